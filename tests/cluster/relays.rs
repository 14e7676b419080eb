//! Relays on the loopback interface, for tests without network namespaces.

use std::collections::HashMap;
use std::net::SocketAddr;

use e2e::free_addr;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::network::{NODES, Node, Port, WORKERS};

/// A connection is made by the first process to the second.
type Link = (Node, Node);

/// The relays of one cluster.
pub(crate) struct Relays {
    listen: HashMap<(Node, Port), SocketAddr>,
    links: HashMap<Link, Relay>,
}

/// A relay between two processes.
struct Relay {
    addr: SocketAddr,
    cut: watch::Sender<bool>,
}

impl Relays {
    pub(crate) async fn start() -> anyhow::Result<Relays> {
        let mut listen = HashMap::new();
        for node in Node::all() {
            for port in node.ports() {
                listen.insert((node, *port), free_addr()?);
            }
        }
        let mut links = HashMap::new();
        for to in 0..NODES {
            let broker = Node::Broker(to);
            let stores = (0..NODES).map(|from| (Node::Store(from), Port::Clients));
            let brokers = (0..NODES).filter(|from| *from != to);
            let brokers = brokers.map(|from| (Node::Broker(from), Port::Routes));
            for (from, port) in stores.chain(brokers) {
                let relay = Relay::start(listen[&(broker, port)]).await?;
                links.insert((from, broker), relay);
            }
        }
        for store in (0..NODES).map(Node::Store) {
            for worker in (0..WORKERS).map(Node::Worker) {
                let relay = Relay::start(listen[&(store, Port::Calls)]).await?;
                links.insert((worker, store), relay);
            }
        }
        Ok(Relays { listen, links })
    }

    pub(crate) fn listen(&self, node: Node, port: Port) -> SocketAddr {
        self.listen[&(node, port)]
    }

    pub(crate) fn reach(&self, from: Node, to: Node, port: Port) -> SocketAddr {
        let relay = self.links.get(&(from, to));
        relay.map_or_else(|| self.listen(to, port), |relay| relay.addr)
    }

    pub(crate) fn set_cut(&self, a: Node, b: Node, is_cut: bool) {
        for link in [(a, b), (b, a)] {
            if let Some(relay) = self.links.get(&link) {
                relay.cut.send_replace(is_cut);
            }
        }
    }
}

impl Relay {
    async fn start(server: SocketAddr) -> anyhow::Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let (cut, is_cut) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(carry(near, server, is_cut.clone()));
            }
        });
        Ok(Relay { addr, cut })
    }
}

/// Carries a connection. While the relay is cut, nothing passes and both ends are left waiting, as they are when
/// packets are lost. Afterwards the connection ends.
async fn carry(mut near: TcpStream, server: SocketAddr, mut is_cut: watch::Receiver<bool>) {
    let was_cut = *is_cut.borrow();
    if was_cut {
        let _ = is_cut.wait_for(|is_cut| !is_cut).await;
        return;
    }
    let Ok(mut far) = TcpStream::connect(server).await else {
        return;
    };
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
        _ = is_cut.wait_for(|is_cut| *is_cut) => {}
    }
    let _ = is_cut.wait_for(|is_cut| !is_cut).await;
}
