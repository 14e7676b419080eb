//! Compresses the compiled-in weights. Uncompressed, they would be a third of the binary.
//!
//! The weights are bf16. Their low bytes are as good as random. Their high bytes hold the exponents, of which few are
//! common, so entropy coding shrinks them to a third. Both kinds are therefore stored apart.

use std::error::Error;
use std::path::Path;

use miniz_oxide::deflate::core::{CompressionStrategy, create_comp_flags_from_zip_params};
use miniz_oxide::deflate::core::{CompressorOxide, TDEFLFlush, TDEFLStatus, compress_to_output};

/// Weight files, and the names under which the crate includes them.
const WEIGHTS: [(&str, &str); 2] = [
    ("model/model.safetensors", "model"),
    ("model/eagle3/model.safetensors", "eagle3"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let out = std::env::var("OUT_DIR")?;
    for (path, name) in WEIGHTS {
        println!("cargo::rerun-if-changed={path}");
        let bytes = std::fs::read(path)?;
        let low: Vec<u8> = bytes.iter().copied().step_by(2).collect();
        let high: Vec<u8> = bytes.iter().copied().skip(1).step_by(2).collect();
        let out = Path::new(&out);
        std::fs::write(out.join(format!("{name}.low")), low)?;
        std::fs::write(out.join(format!("{name}.high")), huffman(&high)?)?;
    }
    Ok(())
}

/// Deflates without a search for repetitions, of which weights have none.
fn huffman(bytes: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let strategy = CompressionStrategy::HuffmanOnly as i32;
    let mut compressor = CompressorOxide::new(create_comp_flags_from_zip_params(6, -15, strategy));
    let mut packed = Vec::new();
    let (status, _) = compress_to_output(&mut compressor, bytes, TDEFLFlush::Finish, |part| {
        packed.extend_from_slice(part);
        true
    });
    match status {
        TDEFLStatus::Done => Ok(packed),
        other => Err(format!("the weights cannot be compressed: {other:?}").into()),
    }
}
