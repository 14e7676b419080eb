//! Signs a namespace for an engine with the plugin inside.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use refrain_protocol::Namespace;
use refrain_service_kit::mesh::{NamespaceSigner, token_of};

use crate::config::MeshFile;
use crate::model_files::model_files;

/// Arguments of `refrain store sign`.
#[derive(Args, Clone, Default)]
pub(super) struct SignArgs {
    /// Configuration file of the gateway, with its keys and models.
    #[arg(long)]
    pub(super) config: PathBuf,
    /// Tenant of that file.
    #[arg(long)]
    pub(super) tenant: String,
    /// Public name of the model.
    #[arg(long)]
    pub(super) model: String,
}

/// Makes the token. It names the tokenizer as the gateway does, so that both mean the same namespace.
///
/// # Errors
/// A configuration without a gateway, a tenant or model that it does not name, and unreadable files.
pub(super) fn token(args: &SignArgs) -> anyhow::Result<String> {
    let file = MeshFile::load_to_sign(&args.config)?;
    let gateway = &file.gateway;
    let has_key = gateway.keys.iter().any(|key| key.tenant == *args.tenant);
    ensure!(
        has_key || gateway.anonymous_tenant.as_deref() == Some(&*args.tenant),
        "{}: {} has no key of this tenant",
        args.tenant,
        args.config.display()
    );
    let model = gateway.models.iter().find(|model| model.id == args.model);
    let model = model.with_context(|| {
        format!(
            "{}: {} has no such model",
            args.model,
            args.config.display()
        )
    })?;
    ensure!(
        !model.text_only,
        "{}: is text_only, and an engine with the plugin inside works with token ids",
        args.model
    );
    let files = model_files(&model.files).with_context(|| format!("model {}", model.id))?;
    token_of(&NamespaceSigner::new(&file.mesh)?.sign(Namespace {
        tenant: args.tenant.clone(),
        model: model.id.clone(),
        tokenizer: files.tokenizer()?.identity().to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use refrain_service_kit::mesh::{MeshAuth, MeshConfig, from_token};

    use super::*;

    #[test]
    fn a_token_names_the_gateways_namespace() {
        let keys = MeshConfig::generate().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("mesh.toml");
        let text = format!(
            "[mesh]\nsecret = \"{}\"\nnamespace_public_key = \"{}\"\nnamespace_signing_key = \"{}\"\n\
             [gateway]\nlisten = \"127.0.0.1:0\"\nanonymous_tenant = \"acme\"\n\
             [[gateway.models]]\nid = \"m\"\nfiles = \"{}\"\n",
            keys.secret,
            keys.namespace_public_key,
            keys.namespace_signing_key,
            refrain_reference_engine::SHIPPED_MODEL
        );
        std::fs::write(&config, text).unwrap();
        let args = |tenant: &str, model: &str| SignArgs {
            config: config.clone(),
            tenant: tenant.into(),
            model: model.into(),
        };
        let signed = from_token(&token(&args("acme", "m")).unwrap()).unwrap();
        MeshAuth::new(&keys).unwrap().verify(&signed).unwrap();
        let tokenizer = model_files(refrain_reference_engine::SHIPPED_MODEL)
            .and_then(|files| Ok(files.tokenizer()?.identity().to_owned()))
            .unwrap();
        let of = (&*signed.namespace.tenant, &*signed.namespace.model);
        assert_eq!(
            (of, &*signed.namespace.tokenizer),
            (("acme", "m"), &*tokenizer)
        );
        for (tenant, model) in [("acme", "other"), ("other", "m")] {
            let error = token(&args(tenant, model)).unwrap_err().to_string();
            assert!(error.starts_with("other: "), "{error}");
        }
    }
}
