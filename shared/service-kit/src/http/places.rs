//! Who may hold a connection: so many in all, so many of one address, and who gives way when there is no place left.
//!
//! A connection between two requests costs its holder nothing, so whoever opens enough of them would keep everybody
//! else out until they time out. Where places are short, the connection that has been idle for longest gives way to
//! the newcomer. Where none is idle the newcomer is refused at once, and does not wait in the system's backlog
//! without a word.
//!
//! A plain value: instants are handed in, and who gives way is told to the caller.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use ipnet::IpNet;

/// A connection that began, or was last of use, less than this ago does not give way: its request may be on the way.
const IDLE_MIN: Duration = Duration::from_millis(250);

/// How many connections one address may hold.
#[derive(Clone, Debug, Default)]
pub struct AddressLimit {
    /// At most so many of one address; of IPv6, of one network of 64 bits. `None`: as many as there are places.
    pub connections_max: Option<usize>,
    /// Addresses that this does not hold for: proxies, behind which many callers are.
    pub exempt: Vec<IpNet>,
}

/// Names a connection.
pub(super) type Id = u64;

/// Why a newcomer gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// All places are in use.
    All,
    /// All places of its address are.
    Address,
}

impl Refusal {
    /// The `limit` label.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Refusal::All => "connections_max",
            Refusal::Address => "address_connections_max",
        }
    }
}

/// The places of a listener.
#[derive(Debug)]
pub(super) struct Places {
    all_max: usize,
    address: AddressLimit,
    held: HashMap<Id, Held>,
    /// By since when they are idle.
    idle: BTreeSet<(Instant, Id)>,
    by_address: HashMap<IpAddr, OfAddress>,
}

#[derive(Debug)]
struct Held {
    /// Whose limit it counts against, if it counts against one.
    address: Option<IpAddr>,
    /// `None` while a request is carried out.
    idle_since: Option<Instant>,
}

#[derive(Debug, Default)]
struct OfAddress {
    held: usize,
    idle: BTreeSet<(Instant, Id)>,
}

impl Places {
    pub(super) fn new(all_max: usize, address: AddressLimit) -> Self {
        Places {
            all_max,
            address,
            held: HashMap::new(),
            idle: BTreeSet::new(),
            by_address: HashMap::new(),
        }
    }

    /// Connections that hold a place.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Gives a newcomer a place. Returns who gives way for it: that connection has left already.
    pub(super) fn enter(
        &mut self,
        id: Id,
        address: Option<IpAddr>,
        now: Instant,
    ) -> Result<Option<Id>, Refusal> {
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
        } else if self.held.len() >= self.all_max {
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
        let held = Held {
            address,
            idle_since: None,
        };
        self.held.insert(id, held);
        self.set_idle(id, Some(now));
        Ok(gives_way)
    }

    /// A request has come. `false`: the connection has given way meanwhile.
    pub(super) fn busy(&mut self, id: Id) -> bool {
        self.set_idle(id, None)
    }

    /// Its answer is complete, or another piece of it has been taken since.
    pub(super) fn idle(&mut self, id: Id, now: Instant) {
        self.set_idle(id, Some(now));
    }

    /// The connection is closed.
    pub(super) fn leave(&mut self, id: Id) {
        self.set_idle(id, None);
        let Some(held) = self.held.remove(&id) else {
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

    fn set_idle(&mut self, id: Id, since: Option<Instant>) -> bool {
        let Some(held) = self.held.get_mut(&id) else {
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

fn longest_idle(idle: &BTreeSet<(Instant, Id)>, now: Instant) -> Option<Id> {
    let (since, id) = idle.first()?;
    (now.saturating_duration_since(*since) >= IDLE_MIN).then_some(*id)
}

/// The holder of an IPv6 address usually has all of its network.
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
    fn the_longest_idle_gives_way_and_the_busy_never() {
        let mut places = Places::new(3, AddressLimit::default());
        let start = Instant::now();
        let later = |ms| start + Duration::from_millis(ms);
        for id in 0..3 {
            assert_eq!(places.enter(id, address(1), later(id)), Ok(None));
        }
        // All have only just come.
        assert_eq!(places.enter(3, address(2), later(3)), Err(Refusal::All));
        assert!(places.busy(0));
        assert_eq!(places.enter(3, address(2), later(300)), Ok(Some(1)));
        assert!(!places.busy(1));
        places.idle(0, later(400));
        assert_eq!(places.enter(4, address(2), later(1_000)), Ok(Some(2)));
        assert_eq!(places.enter(5, address(2), later(1_000)), Ok(Some(3)));
        assert_eq!(places.enter(6, address(2), later(1_000)), Ok(Some(0)));
        for id in 4..7 {
            assert!(places.busy(id));
        }
        assert_eq!(places.enter(7, address(2), later(9_000)), Err(Refusal::All));
        places.leave(5);
        assert_eq!(places.enter(7, address(2), later(9_000)), Ok(None));
        assert_eq!(places.len(), 3);
    }

    #[test]
    fn an_address_has_its_own_limit_and_makes_nobody_else_give_way() {
        let mut places = Places::new(100, limit(2));
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        places.enter(0, address(9), start).unwrap();
        places.enter(1, address(1), start).unwrap();
        places.enter(2, address(1), start).unwrap();
        assert_eq!(places.enter(3, address(1), start), Err(Refusal::Address));
        assert_eq!(places.enter(3, address(1), later), Ok(Some(1)));
        assert!(places.busy(2) && places.busy(3));
        assert_eq!(places.enter(4, address(1), later), Err(Refusal::Address));
        places.leave(2);
        assert_eq!(places.enter(4, address(1), later), Ok(None));
        // A proxy has as many as there are.
        for id in 10..20 {
            assert_eq!(places.enter(id, address(200), later), Ok(None));
        }
        for id in 0..20 {
            places.leave(id);
        }
        assert_eq!(
            (places.len(), places.by_address.len(), places.idle.len()),
            (0, 0, 0)
        );
    }

    #[test]
    fn a_network_of_ipv6_is_one_address_and_a_mapped_one_is_that_of_ipv4() {
        let parse = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(parse("2001:db8:1:2:3::4"), parse("2001:db8:1:2:ffff::1"));
        assert_ne!(parse("2001:db8:1:2:3::4"), parse("2001:db8:1:3:3::4"));
        assert_eq!(parse("::ffff:192.0.2.1"), parse("192.0.2.1"));
        assert!(parse("::1").is_loopback());
    }
}
