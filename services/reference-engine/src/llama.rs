//! Models in GGUF files, computed by llama.cpp inside this process, which is a [`Backend`](crate::backend::Backend).
//!
//! Without the feature `llama` there is no llama.cpp, and [`load`] says so. `cuda`, `metal` and `vulkan` build
//! llama.cpp for these devices too.
//!
//! llama.cpp sums in another order when it computes several tokens at once. So the logits of a token may differ in
//! their last bits between plain decoding and a draft tree, and where the two likeliest tokens are that close, so may
//! the output. docs/own-model.md says how often that was seen.

#[cfg(any(feature = "llama", test))]
#[cfg_attr(
    not(feature = "llama"),
    allow(dead_code, reason = "only its tests run without llama.cpp")
)]
mod sequences;

#[cfg(feature = "llama")]
mod binding;
#[cfg(feature = "llama")]
mod context;
#[cfg(not(feature = "llama"))]
mod context {
    //! In place of llama.cpp, which this build does not have.

    use crate::backend::BackendModel;
    use crate::config::EngineConfig;

    pub(super) fn load(path: &str, _: &EngineConfig) -> anyhow::Result<BackendModel> {
        anyhow::bail!("{path}: this build has no llama.cpp")
    }
}

use std::path::Path;

use crate::backend::BackendModel;
use crate::config::EngineConfig;

/// Whether a model's source is a file for llama.cpp.
pub fn is_gguf(source: &str) -> bool {
    Path::new(source)
        .extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}

/// Checks that this build can compute GGUF files, and on this processor.
///
/// # Errors
/// It cannot, and what to do.
pub fn check_llama(source: &str) -> anyhow::Result<()> {
    anyhow::ensure!(
        cfg!(feature = "llama"),
        "{source}: this build of Refrain cannot read GGUF files; build it with `cargo build --release --features llama`, \
         which needs cmake and libclang, or put Refrain in front of llama-server (docs/engines.md)"
    );
    // llama.cpp is compiled for these instructions. A processor without them would end the process at the first one.
    #[cfg(all(feature = "llama", target_arch = "x86_64"))]
    anyhow::ensure!(
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2"),
        "{source}: llama.cpp inside Refrain needs a processor with AVX2, FMA, F16C and BMI2, and this one lacks some; \
         use a newer processor, or put Refrain in front of llama-server (docs/engines.md)"
    );
    Ok(())
}

/// The name of the device where there is no accelerator.
pub const CPU: &str = "the CPU";

/// The names of the devices that compute a GGUF file.
pub fn llama_devices() -> String {
    #[cfg(feature = "llama")]
    let names = binding::accelerators();
    #[cfg(not(feature = "llama"))]
    let names: Vec<String> = Vec::new();
    match names.is_empty() {
        true => CPU.to_owned(),
        false => names.join(", "),
    }
}

/// Loads a GGUF file, as a model that llama.cpp computes. This takes seconds to minutes. `None`: it is another kind.
///
/// # Errors
/// The file is no model that can be served, its tokenizer differs from llama.cpp's, or this build has no llama.cpp.
pub(crate) fn load(source: &str, config: &EngineConfig) -> anyhow::Result<Option<BackendModel>> {
    if !is_gguf(source) {
        return Ok(None);
    }
    check_llama(source)?;
    context::load(source, config).map(Some)
}
