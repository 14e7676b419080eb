//! Tells the program how far its code is optimised, so that it can say when a measurement would mislead.

#![allow(
    clippy::expect_used,
    reason = "cargo sets the variable for every build script"
)]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A name with the prefix `REFRAIN_` would be taken for a setting where cargo runs the program.
    let level = std::env::var("OPT_LEVEL").expect("cargo sets OPT_LEVEL");
    println!("cargo::rustc-env=BUILD_OPT_LEVEL={level}");
}
