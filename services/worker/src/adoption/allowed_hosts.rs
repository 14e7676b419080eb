//! Which engines that register may be called.

use std::net::IpAddr;

use ipnet::IpNet;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::EngineAddress;

/// The hosts that may be called.
#[derive(Debug)]
pub(super) struct AllowedHosts {
    names: Vec<String>,
    networks: Vec<IpNet>,
}

impl AllowedHosts {
    /// Reads a list of names, ends of names, addresses and networks.
    pub(super) fn read(list: &[String]) -> Self {
        let (mut names, mut networks) = (Vec::new(), Vec::new());
        for entry in list {
            let address = entry.parse::<IpAddr>().ok().map(IpNet::from);
            match entry.parse::<IpNet>().ok().or(address) {
                Some(network) => networks.push(network),
                None => names.push(entry.to_ascii_lowercase()),
            }
        }
        AllowedHosts { names, networks }
    }

    /// Checks that an engine may be called. A name counts by itself and not by its addresses.
    ///
    /// # Errors
    /// `Forbidden` if its host is on no list.
    pub(super) fn check(&self, engine: &EngineAddress) -> Result<(), ApiError> {
        let host = engine.host.trim_start_matches('[').trim_end_matches(']');
        let is_allowed = match host.parse::<IpAddr>() {
            Ok(address) => {
                let address = address.to_canonical();
                self.networks.iter().any(|it| it.contains(&address))
            }
            Err(_) => self.names.iter().any(|name| match name.starts_with('.') {
                true => host.ends_with(name.as_str()),
                false => host == name,
            }),
        };
        if is_allowed {
            return Ok(());
        }
        let message = format!(
            "engines on the host {host} may not register; see worker.adoption.allowed_hosts"
        );
        Err(ApiError::new(ErrorKind::Forbidden, message).with_code("host_not_allowed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hosts_of_the_list_may_be_called() {
        let may = |list: &[&str], url: &str| {
            let list: Vec<String> = list.iter().map(|entry| (*entry).to_owned()).collect();
            let engine = EngineAddress::read(url).unwrap();
            let checked = AllowedHosts::read(&list).check(&engine);
            assert!(
                checked
                    .as_ref()
                    .err()
                    .is_none_or(|error| error.has_code("host_not_allowed"))
            );
            checked.is_ok()
        };
        let config = crate::config::AdoptionConfig::default();
        let own: Vec<&str> = config.allowed_hosts.iter().map(String::as_str).collect();
        for url in [
            "http://localhost:1",
            "http://127.0.0.1:1",
            "http://127.9.9.9:1",
            "http://[::1]:1",
            "http://[::ffff:127.0.0.1]:1",
        ] {
            assert!(may(&own, url), "{url}");
        }
        for url in [
            "http://169.254.169.254",
            "http://10.0.0.1:1",
            "http://[::2]:1",
            "http://0.0.0.0:1",
            "http://localhost.example:1",
            "http://[::ffff:10.0.0.1]:1",
        ] {
            assert!(!may(&own, url), "{url}");
        }
        let some = ["10.1.0.0/16", "fd00::5", ".pods.example", "Gpu-1"];
        for (url, is_allowed) in [
            ("http://10.1.2.3:1", true),
            ("http://10.2.0.1:1", false),
            ("http://[fd00::5]:1", true),
            ("http://[fd00::6]:1", false),
            ("http://a.pods.example:1", true),
            ("http://pods.example:1", false),
            ("http://evilpods.example:1", false),
            ("http://gpu-1:1", true),
            ("http://gpu-10:1", false),
        ] {
            assert_eq!(may(&some, url), is_allowed, "{url}");
        }
    }
}
