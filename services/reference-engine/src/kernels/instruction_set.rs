//! Chooses the widest vector instructions of the machine at run time.

use std::sync::OnceLock;

/// Vector instructions that the kernels are compiled for. Every variant gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// 512-bit registers, 32 of them.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 256-bit registers with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Plain loops as the compiler vectorises them: NEON on aarch64, and slow where there is no FMA instruction.
    Plain,
}

impl InstructionSet {
    /// Returns the best instruction set of this machine. It is detected once.
    pub(crate) fn detect() -> Self {
        static BEST: OnceLock<InstructionSet> = OnceLock::new();
        *BEST.get_or_init(|| InstructionSet::available()[0])
    }

    /// Returns every instruction set that this machine can run, best first.
    pub(crate) fn available() -> Vec<InstructionSet> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                found.push(InstructionSet::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                found.push(InstructionSet::Avx2);
            }
        }
        found.push(InstructionSet::Plain);
        found
    }
}

/// Compiles a function of plain loops once per instruction set, and chooses one version at run time.
///
/// Rust neither fuses nor reorders float operations, so every version gives the same bits. Only the speed differs.
macro_rules! vectorised {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name($($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn plain($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                fn avx512($($arg: $type),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                match $crate::kernels::instruction_set::InstructionSet::detect() {
                    // SAFETY: `InstructionSet::detect` found the feature on this CPU.
                    $crate::kernels::instruction_set::InstructionSet::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: `InstructionSet::detect` found the feature on this CPU.
                    $crate::kernels::instruction_set::InstructionSet::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::kernels::instruction_set::InstructionSet::Plain => {}
                }
            }
            plain($($arg),*)
        }
    };
}
pub(crate) use vectorised;
