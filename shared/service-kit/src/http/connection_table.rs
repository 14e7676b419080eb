//! Limits on connections, in all and of one address, and the choice of the one that gives way when a limit is
//! reached.
//!
//! An idle connection costs its holder nothing, so one caller could open enough of them to keep all others out until
//! they time out. When a limit is reached, the connection that has been idle for longest is closed for the new one.
//! If none is idle, the new one is refused at once, instead of waiting in the system's backlog without an answer.
//!
//! This is a plain value: instants are arguments, and the caller closes the connection that gives way.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use ipnet::IpNet;

/// A connection that began or was last used less than this ago does not give way, because its request may be on its
/// way.
const IDLE_MIN: Duration = Duration::from_millis(250);

/// The limit on connections of one address.
#[derive(Clone, Debug, Default)]
pub struct AddressLimit {
    /// Maximum number of connections of one address, or of one IPv6 network of 64 bits. `None`: only the limit on all
    /// connections holds.
    pub connections_max: Option<usize>,
    /// Addresses without this limit: proxies, since many callers share one.
    pub exempt: Vec<IpNet>,
}

/// The number of a connection.
pub(super) type ConnectionId = u64;

/// Why a new connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The limit on all connections is reached.
    All,
    /// The limit on connections of its address is reached.
    Address,
}

impl Refusal {
    /// The value of the `limit` label.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Refusal::All => "connections_max",
            Refusal::Address => "address_connections_max",
        }
    }
}

/// The open connections of a listener.
#[derive(Debug)]
pub(super) struct ConnectionTable {
    all_max: usize,
    address: AddressLimit,
    open: HashMap<ConnectionId, OpenConnection>,
    /// Idle connections, the longest idle one first.
    idle: BTreeSet<(Instant, ConnectionId)>,
    by_address: HashMap<IpAddr, AddressConnections>,
}

#[derive(Debug)]
struct OpenConnection {
    /// The address whose limit it counts against, if one applies.
    address: Option<IpAddr>,
    /// `None` while a request is in flight.
    idle_since: Option<Instant>,
}

#[derive(Debug, Default)]
struct AddressConnections {
    held: usize,
    idle: BTreeSet<(Instant, ConnectionId)>,
}

impl ConnectionTable {
    pub(super) fn new(all_max: usize, address: AddressLimit) -> Self {
        ConnectionTable {
            all_max,
            address,
            open: HashMap::new(),
            idle: BTreeSet::new(),
            by_address: HashMap::new(),
        }
    }

    /// Number of open connections.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Adds a connection. Returns the connection that has to be closed for it, which is no longer in the table.
    pub(super) fn enter(
        &mut self,
        id: ConnectionId,
        address: Option<IpAddr>,
        now: Instant,
    ) -> Result<Option<ConnectionId>, Refusal> {
        let address = address.map(network_of).filter(|address| {
            let exempt = &self.address.exempt;
            self.address.connections_max.is_some()
                && !exempt.iter().any(|net| net.contains(address))
        });
        let of_address = address.and_then(|address| self.by_address.get(&address));
        let is_full = match (of_address, self.address.connections_max) {
            (Some(of_address), Some(most)) => of_address.held >= most,
            _ => false,
        };
        let gives_way = if is_full {
            let idle = of_address.and_then(|of_address| longest_idle(&of_address.idle, now));
            Some(idle.ok_or(Refusal::Address)?)
        } else if self.open.len() >= self.all_max {
            Some(longest_idle(&self.idle, now).ok_or(Refusal::All)?)
        } else {
            None
        };
        if let Some(id) = gives_way {
            self.leave(id);
        }
        if let Some(address) = address {
            self.by_address.entry(address).or_default().held += 1;
        }
        let held = OpenConnection {
            address,
            idle_since: None,
        };
        self.open.insert(id, held);
        self.set_idle(id, Some(now));
        Ok(gives_way)
    }

    /// Notes that a request has arrived. Returns `false` if the connection has given way meanwhile.
    pub(super) fn busy(&mut self, id: ConnectionId) -> bool {
        self.set_idle(id, None)
    }

    /// Notes that the answer is complete, or that the caller has read another piece of it since.
    pub(super) fn idle(&mut self, id: ConnectionId, now: Instant) {
        self.set_idle(id, Some(now));
    }

    /// Removes a connection that is closed.
    pub(super) fn leave(&mut self, id: ConnectionId) {
        self.set_idle(id, None);
        let Some(held) = self.open.remove(&id) else {
            return;
        };
        if let Some(address) = held.address
            && let Some(of_address) = self.by_address.get_mut(&address)
        {
            of_address.held -= 1;
            if of_address.held == 0 {
                self.by_address.remove(&address);
            }
        }
    }

    fn set_idle(&mut self, id: ConnectionId, since: Option<Instant>) -> bool {
        let Some(held) = self.open.get_mut(&id) else {
            return false;
        };
        let before = std::mem::replace(&mut held.idle_since, since);
        let of_address = held
            .address
            .and_then(|address| self.by_address.get_mut(&address));
        for idle in [Some(&mut self.idle), of_address.map(|of| &mut of.idle)]
            .into_iter()
            .flatten()
        {
            if let Some(before) = before {
                idle.remove(&(before, id));
            }
            if let Some(since) = since {
                idle.insert((since, id));
            }
        }
        true
    }
}

fn longest_idle(idle: &BTreeSet<(Instant, ConnectionId)>, now: Instant) -> Option<ConnectionId> {
    let (since, id) = idle.first()?;
    (now.saturating_duration_since(*since) >= IDLE_MIN).then_some(*id)
}

/// The address that a limit counts. The holder of an IPv6 address usually has all of its network of 64 bits.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let network = u128::from(address) & !u128::from(u64::MAX);
            IpAddr::V6(Ipv6Addr::from(network))
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    fn limit(connections_max: usize) -> AddressLimit {
        AddressLimit {
            connections_max: Some(connections_max),
            exempt: vec!["192.0.2.200/32".parse().unwrap()],
        }
    }

    #[test]
    fn the_longest_idle_connection_gives_way_and_a_busy_one_never() {
        let mut table = ConnectionTable::new(3, AddressLimit::default());
        let start = Instant::now();
        let later = |ms| start + Duration::from_millis(ms);
        for id in 0..3 {
            assert_eq!(table.enter(id, address(1), later(id)), Ok(None));
        }
        // All of them are too new to give way.
        assert_eq!(table.enter(3, address(2), later(3)), Err(Refusal::All));
        assert!(table.busy(0));
        assert_eq!(table.enter(3, address(2), later(300)), Ok(Some(1)));
        assert!(!table.busy(1));
        table.idle(0, later(400));
        assert_eq!(table.enter(4, address(2), later(1_000)), Ok(Some(2)));
        assert_eq!(table.enter(5, address(2), later(1_000)), Ok(Some(3)));
        assert_eq!(table.enter(6, address(2), later(1_000)), Ok(Some(0)));
        for id in 4..7 {
            assert!(table.busy(id));
        }
        assert_eq!(table.enter(7, address(2), later(9_000)), Err(Refusal::All));
        table.leave(5);
        assert_eq!(table.enter(7, address(2), later(9_000)), Ok(None));
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn an_address_has_its_own_limit_and_never_displaces_other_addresses() {
        let mut table = ConnectionTable::new(100, limit(2));
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        table.enter(0, address(9), start).unwrap();
        table.enter(1, address(1), start).unwrap();
        table.enter(2, address(1), start).unwrap();
        assert_eq!(table.enter(3, address(1), start), Err(Refusal::Address));
        assert_eq!(table.enter(3, address(1), later), Ok(Some(1)));
        assert!(table.busy(2) && table.busy(3));
        assert_eq!(table.enter(4, address(1), later), Err(Refusal::Address));
        table.leave(2);
        assert_eq!(table.enter(4, address(1), later), Ok(None));
        // A proxy is exempt from the limit on its address.
        for id in 10..20 {
            assert_eq!(table.enter(id, address(200), later), Ok(None));
        }
        for id in 0..20 {
            table.leave(id);
        }
        assert_eq!(
            (table.len(), table.by_address.len(), table.idle.len()),
            (0, 0, 0)
        );
    }

    #[test]
    fn an_ipv6_network_counts_as_one_address_and_a_mapped_address_as_ipv4() {
        let parse = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(parse("2001:db8:1:2:3::4"), parse("2001:db8:1:2:ffff::1"));
        assert_ne!(parse("2001:db8:1:2:3::4"), parse("2001:db8:1:3:3::4"));
        assert_eq!(parse("::ffff:192.0.2.1"), parse("192.0.2.1"));
        assert!(parse("::1").is_loopback());
    }
}
