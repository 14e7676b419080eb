//! The network of all processes, in which any two can be cut off from each other.
//!
//! As root each process has a network namespace of its own, so that packets are lost as between machines. Where that
//! is not possible, all connections go through relays on the loopback interface. Nothing passes a relay that is cut.

use std::fmt;
use std::net::SocketAddr;

use crate::mesh::Mesh;
use crate::namespaces::Namespaces;
use crate::relays::Relays;

/// Number of stores, and of brokers.
pub(crate) const NODES: usize = 3;

/// Number of gateways.
pub(crate) const GATEWAYS: usize = 2;

/// Number of workers, each of which has an engine of its own.
pub(crate) const WORKERS: usize = 2;

/// A process of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Node {
    Store(usize),
    Broker(usize),
    Scheduler,
    Gateway(usize),
    Worker(usize),
    Engine(usize),
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Store(number) => write!(f, "store-{number}"),
            Node::Broker(number) => write!(f, "broker-{number}"),
            Node::Scheduler => f.write_str("scheduler"),
            Node::Gateway(number) => write!(f, "gateway-{number}"),
            Node::Worker(number) => write!(f, "worker-{number}"),
            Node::Engine(number) => write!(f, "engine-{number}"),
        }
    }
}

/// The purpose of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Port {
    /// Callers over HTTP.
    Calls,
    /// A broker's clients.
    Clients,
    /// The other brokers.
    Routes,
}

impl Node {
    /// All processes.
    pub(crate) fn all() -> impl Iterator<Item = Node> {
        let stores = (0..NODES).map(Node::Store);
        stores
            .chain((0..NODES).map(Node::Broker))
            .chain(Mesh::nodes())
    }

    pub(crate) fn ports(self) -> &'static [Port] {
        match self {
            Node::Broker(_) => &[Port::Clients, Port::Routes],
            _ => &[Port::Calls],
        }
    }
}

/// The network of one cluster.
pub(crate) enum Network {
    Namespaces(Namespaces),
    Relays(Relays),
}

impl Network {
    /// Builds namespaces where that is possible and `may_be_real`, and relays otherwise. Says which it is.
    pub(crate) async fn build(may_be_real: bool) -> anyhow::Result<Network> {
        let refused = match may_be_real.then(Namespaces::create) {
            Some(Ok(namespaces)) => {
                eprintln!("cluster: each process has a network namespace of its own");
                return Ok(Network::Namespaces(namespaces));
            }
            Some(Err(error)) => format!("{error:#}"),
            None => "CLUSTER_NETWORK says so".to_owned(),
        };
        eprintln!("cluster: relays instead of network namespaces, since {refused}");
        Ok(Network::Relays(Relays::start().await?))
    }

    /// The program that starts a process in its place, with its arguments.
    pub(crate) fn through(&self, node: Node) -> Vec<String> {
        match self {
            Network::Namespaces(namespaces) => namespaces.through(node),
            Network::Relays(_) => Vec::new(),
        }
    }

    /// Where a process listens. The test itself reaches it there, whatever is cut.
    pub(crate) fn listen(&self, node: Node, port: Port) -> SocketAddr {
        match self {
            Network::Namespaces(namespaces) => namespaces.listen(node, port),
            Network::Relays(relays) => relays.listen(node, port),
        }
    }

    /// Where a process reaches another one.
    pub(crate) fn reach(&self, from: Node, to: Node, port: Port) -> SocketAddr {
        match self {
            Network::Namespaces(namespaces) => namespaces.listen(to, port),
            Network::Relays(relays) => relays.reach(from, to, port),
        }
    }

    /// The address of its routes that a broker tells others, if it is not the one where it listens.
    pub(crate) fn advertised(&self) -> Option<SocketAddr> {
        match self {
            Network::Namespaces(_) => None,
            // Brokers would tell each other addresses that no relay leads to. Nobody listens at this one.
            Network::Relays(_) => Some(([127, 0, 0, 1], 1).into()),
        }
    }

    /// Cuts two processes off from each other, or connects them again.
    pub(crate) fn set_cut(&self, a: Node, b: Node, is_cut: bool) -> anyhow::Result<()> {
        match self {
            Network::Namespaces(namespaces) => namespaces.set_cut(a, b, is_cut),
            Network::Relays(relays) => {
                relays.set_cut(a, b, is_cut);
                Ok(())
            }
        }
    }
}
