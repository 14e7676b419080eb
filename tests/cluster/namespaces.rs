//! A network namespace for each process, all joined by one bridge. It needs root and iproute2.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::network::{Node, Port};

/// The interface in each namespace.
const INTERFACE: &str = "eth0";

/// A hardware address that nobody has. All that is sent there is lost without a word, as in a network that is cut.
const NOBODY: &str = "02:00:00:00:00:01";

/// The namespaces of one cluster. They are removed when this is dropped.
pub(crate) struct Namespaces {
    process: u32,
    /// The third byte of all addresses, which begin with 198.18. That network is reserved for tests.
    subnet: u8,
}

impl Namespaces {
    pub(crate) fn create() -> anyhow::Result<Namespaces> {
        remove_abandoned()?;
        let process = std::process::id();
        let taken = ip(&["-oneline", "address"])?;
        let subnet = (0..=u8::MAX)
            .map(|at| at.wrapping_add(process as u8))
            .find(|subnet| !taken.contains(&format!("198.18.{subnet}.")))
            .context("all networks of 198.18 are taken")?;
        // From here on its drop removes what there is.
        let namespaces = Namespaces { process, subnet };
        let bridge = bridge(process);
        ip(&["link", "add", &bridge, "type", "bridge"])?;
        let own = format!("198.18.{subnet}.254/24");
        ip(&["address", "add", &own, "dev", &bridge])?;
        ip(&["link", "set", &bridge, "up"])?;
        for node in Node::all() {
            namespaces.add(node, &bridge)?;
        }
        Ok(namespaces)
    }

    fn add(&self, node: Node, bridge: &str) -> anyhow::Result<()> {
        let (name, link) = (name(self.process, node), link(self.process, node));
        ip(&["netns", "add", &name])?;
        let peer = ["type", "veth", "peer", "name", INTERFACE, "netns", &name];
        ip(&[&["link", "add", &link][..], &peer].concat())?;
        ip(&["link", "set", &link, "master", bridge, "up"])?;
        let address = format!("{}/24", self.listen(node, Port::Calls).ip());
        let at = ["-n", &name];
        ip(&[&at[..], &["address", "add", &address, "dev", INTERFACE]].concat())?;
        ip(&[&at[..], &["link", "set", INTERFACE, "up"]].concat())?;
        ip(&[&at[..], &["link", "set", "lo", "up"]].concat())?;
        Ok(())
    }

    pub(crate) fn through(&self, node: Node) -> Vec<String> {
        let name = name(self.process, node);
        ["ip", "netns", "exec", &name].map(str::to_owned).into()
    }

    pub(crate) fn listen(&self, node: Node, port: Port) -> SocketAddr {
        let host = match node {
            Node::Store(number) => 1 + number as u8,
            Node::Broker(number) => 101 + number as u8,
            Node::Scheduler => 50,
            Node::Gateway(number) => 51 + number as u8,
            Node::Worker(number) => 61 + number as u8,
            Node::Engine(number) => 71 + number as u8,
        };
        let port = match port {
            Port::Calls => 8_203,
            Port::Clients => 4_222,
            Port::Routes => 6_222,
        };
        ([198, 18, self.subnet, host], port).into()
    }

    pub(crate) fn set_cut(&self, a: Node, b: Node, is_cut: bool) -> anyhow::Result<()> {
        for (from, to) in [(a, b), (b, a)] {
            let name = name(self.process, from);
            let to = self.listen(to, Port::Calls).ip().to_string();
            let at = ["-n", &name, "neighbour"];
            let entry: &[&str] = match is_cut {
                true => &["replace", &to, "lladdr", NOBODY],
                // This is no error where nothing is cut.
                false => &["flush", "to", &to],
            };
            ip(&[&at[..], entry, &["dev", INTERFACE, "nud", "permanent"]].concat())?;
        }
        Ok(())
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        remove(self.process);
    }
}

fn name(process: u32, node: Node) -> String {
    format!("refrain-{process}-{node}")
}

/// The bridge's end of a namespace's interface. Such names have at most 15 bytes.
fn link(process: u32, node: Node) -> String {
    let (letter, number) = match node {
        Node::Store(number) => ('s', number),
        Node::Broker(number) => ('b', number),
        Node::Scheduler => ('d', 0),
        Node::Gateway(number) => ('g', number),
        Node::Worker(number) => ('w', number),
        Node::Engine(number) => ('e', number),
    };
    format!("rf{process}{letter}{number}")
}

fn bridge(process: u32) -> String {
    format!("rf{process}br")
}

/// Removes all that a process has created. Parts that are not there are no fault.
fn remove(process: u32) {
    for node in Node::all() {
        // Processes that are about to end keep a namespace for a moment, and its link would stay as long.
        let _ = ip(&["link", "delete", &link(process, node)]);
        let _ = ip(&["netns", "delete", &name(process, node)]);
    }
    let _ = ip(&["link", "delete", &bridge(process)]);
}

/// Removes the namespaces of earlier tests that were killed.
fn remove_abandoned() -> anyhow::Result<()> {
    let list = ip(&["netns", "list"])?;
    let mut processes: Vec<u32> = list
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix("refrain-")?;
            rest.split('-').next()?.parse().ok()
        })
        .collect();
    processes.dedup();
    for process in processes {
        if !Path::new(&format!("/proc/{process}")).exists() {
            remove(process);
        }
    }
    Ok(())
}

/// Runs `ip` of iproute2. Returns its output.
fn ip(arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("ip").args(arguments).output();
    let output = output.context("iproute2 is missing")?;
    ensure!(
        output.status.success(),
        "ip {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
