//! The values of `refrain up` where its file says nothing.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use refrain_accounts::tenants::key::KeyConfig;

use super::{MeshFile, dev_keys, shipped_model};
use crate::up_engines::add_models;

/// Address of the console of `refrain up`, if nobody else has it.
const CONSOLE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8090);

impl MeshFile {
    /// Adds what `refrain up` needs where the file says nothing: a few tenants with keys for development, the
    /// shipped model, and a place for usage.
    pub(crate) fn fill_in_for_up(&mut self) {
        if !self.has_callers() {
            self.add_callers(dev_keys().into_iter().filter_map(|key| {
                Some(KeyConfig {
                    tenant: key.trim_start_matches("refrain-").parse().ok()?,
                    key: Some(key),
                    key_sha256: None,
                })
            }));
        }
        add_models(&self.engines, &mut self.gateway.models);
        if self.gateway.models.is_empty() {
            self.gateway.models = vec![shipped_model()];
        }
        if self.gateway.usage_dir.is_none() {
            self.gateway.usage_dir = Some(self.draft_store.data_dir.join("usage"));
        }
        self.fill_in_trainer();
        if self.worker.adoption.is_on() {
            if self.worker.engine.model.is_empty() {
                let first = self.gateway.models.first().cloned().unwrap_or_default();
                let engine = &mut self.worker.engine;
                (engine.model, engine.files) = (first.id, first.files);
            }
            let file = self.draft_store.data_dir.join("engines.json");
            self.worker.adoption.file.get_or_insert(file);
        }
        self.fill_in_console();
        // Nobody else reaches these listeners, and the tenants are no secret.
        self.gateway.shows_metrics |= self.gateway.is_trial && self.is_open_to_this_machine_alone();
        if self.worker.advertise_url.is_empty() {
            // Nobody calls this URL, but a lease has to name one.
            self.worker.advertise_url = "local:".into();
        }
    }

    /// Adds the console. Without an operations listener it gets one that only this machine reaches.
    fn fill_in_console(&mut self) {
        let gateway = &mut self.gateway;
        if gateway.console == Some(false) {
            return;
        }
        gateway.console = Some(true);
        if gateway.operations_listen.is_none() {
            let mut address = CONSOLE;
            if gateway.listen.ends_with(":0") {
                address.set_port(0);
            }
            gateway.operations_listen = Some(address);
            gateway.is_trial = true;
        }
    }

    /// Gives the trainers' listener a tenant, and its sessions a place beside the drafts.
    fn fill_in_trainer(&mut self) {
        let trainer = &mut self.gateway.trainer;
        if trainer.listen.is_none() {
            return;
        }
        let first = self.gateway.keys.first().map(|key| key.tenant.clone());
        let first = first.or_else(|| self.gateway.anonymous_tenant.clone());
        trainer.tenant = trainer.tenant.take().or(first);
        let folder = self.draft_store.data_dir.join("sessions");
        trainer.sessions.folder.get_or_insert(folder);
    }
}
