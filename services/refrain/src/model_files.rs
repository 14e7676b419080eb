//! The files of the models that a configuration names.

use std::sync::Arc;

use anyhow::Context;
use refrain_tokenization::ModelFiles;
use refrain_worker::{EngineConfig, ExpectedModel};

/// The model that engines have to serve.
pub(crate) fn expected_model(config: &EngineConfig) -> anyhow::Result<ExpectedModel> {
    let key = || format!("worker.engine.files = {:?}", config.files);
    let files = model_files(&config.files).with_context(key)?;
    let served_model = match config.served_model.as_str() {
        "" => config.model.clone(),
        name => name.to_owned(),
    };
    Ok(ExpectedModel {
        model: config.model.clone(),
        served_model,
        tokenizer: Arc::new(files.tokenizer().with_context(key)?),
        max_context: config.max_context.or_else(|| files.max_context()),
    })
}

/// Reads a model's tokenizer and template, from the binary itself or from a folder. The folder needs no weights: only
/// the reference engine reads those.
pub(crate) fn model_files(source: &str) -> anyhow::Result<ModelFiles> {
    if !source.starts_with(BUILTIN) {
        return Ok(ModelFiles::from_path(source)?);
    }
    // The engine understands the same names, such as `builtin:refrain-tiny`.
    let files = refrain_reference_engine::ModelFiles::open(source)?;
    files
        .tokenization
        .with_context(|| format!("{source}: a model without tokenizer.json cannot be served"))
}

/// How the names of models in the binary begin.
pub(crate) const BUILTIN: &str = "builtin:";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_a_tokenizer_needs_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().to_str().unwrap();
        let error = format!("{:#}", model_files(source).unwrap_err());
        assert!(
            error.contains("tokenizer.json") && !error.contains("safetensors"),
            "{error}"
        );
        let shipped = model_files(refrain_reference_engine::SHIPPED_MODEL).unwrap();
        std::fs::write(
            folder.path().join("tokenizer.json"),
            &shipped.tokenizer_json,
        )
        .unwrap();
        let read = model_files(source).unwrap();
        assert_eq!(
            read.tokenizer().unwrap().identity(),
            shipped.tokenizer().unwrap().identity()
        );
        assert!(read.chat_template().unwrap().is_none());
    }
}
