//! The counts on a real Redis server.

#[path = "../../../tests/support/redis_server.rs"]
mod redis_server;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::script::SCRIPT;
use super::*;
use crate::metrics::AccountMetrics;
use crate::tenants::limit_usage::{Refusal, Usage};
use crate::tenants::policy::TenantPolicy;
use crate::tenants::{Caller, Limiter, QuotaTicket};
use redis_server::RedisServer;

const ACME: &str = "acme";

fn config(server: &RedisServer) -> LimitsRedisConfig {
    LimitsRedisConfig {
        url: server.url(),
        // The machine of a test may be busy.
        timeout_ms: 2_000,
        ..LimitsRedisConfig::default()
    }
}

/// A gateway's limiter, and its metrics.
struct Gateway {
    limiter: Limiter,
    counts: RedisCounts,
}

impl Gateway {
    fn new(config: LimitsRedisConfig, share: f64) -> Self {
        let metrics = Metrics::new().unwrap();
        let counts = RedisCounts::start(config, &metrics).unwrap();
        let families = Arc::new(AccountMetrics::new(&metrics).unwrap());
        Gateway {
            limiter: Limiter::with_redis(share, Some(counts.clone()), families),
            counts,
        }
    }

    async fn connected(config: LimitsRedisConfig, share: f64) -> Self {
        let gateway = Gateway::new(config, share);
        gateway.until_up().await;
        gateway
    }

    async fn until_up(&self) {
        let up = self.counts.shared.link.connected();
        let up = tokio::time::timeout(Duration::from_secs(60), up).await;
        up.expect("Redis does not come up");
    }

    fn is_up(&self) -> bool {
        self.counts.shared.families.is_up.get() == 1
    }

    fn fallbacks(&self) -> u64 {
        self.counts.shared.families.fallbacks.get()
    }

    async fn begin(&self, limits: LimitsEntry) -> Option<QuotaTicket> {
        self.limiter.begin(&acme(limits), Instant::now()).await.ok()
    }

    /// The level of a bucket of `acme` in Redis, by a call that takes nothing.
    async fn left(&self, limits: LimitsEntry) -> [Option<f64>; 4] {
        let subject = (Subject::Tenant(ACME.into()), limits);
        let mut place = self.counts.place(&[subject]);
        place.reserve(|_| 0.0).await.unwrap().left[0]
    }
}

fn acme(limits: LimitsEntry) -> Caller {
    Caller {
        tenant: ACME.parse().unwrap(),
        tenant_limits: limits,
        policy: TenantPolicy::default(),
        key: None,
        fixed_key: None,
    }
}

fn requests(per_minute: u64) -> LimitsEntry {
    LimitsEntry {
        requests_per_minute: Some(per_minute),
        ..LimitsEntry::default()
    }
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(300);
    while !holds().await {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn the_script_and_the_buckets_agree_on_random_calls() {
    let server = RedisServer::plain();
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let clock = "local time = redis.call('TIME')";
    assert!(SCRIPT.contains(clock));
    let script = SCRIPT.replace(clock, "local time = { ARGV[#ARGV - 1], ARGV[#ARGV] }");
    let mut random = fastrand::Rng::with_seed(7);
    let start = Instant::now();
    let (mut passed_us, start_s) = (0_u64, 1_800_000_000_u64);
    let names = [Subject::Tenant(ACME.into()), Subject::Key("k".into())];
    let mut limits = [LimitsEntry::default(); 2];
    let mut usages = [Usage::default(), Usage::default()];
    let mut open: HashSet<String> = HashSet::new();
    let (mut granted, mut refused) = (0, 0);
    for number in 0..3_000 {
        passed_us += random.u64(0..3_000_000) * random.u64(0..2);
        let now = start + Duration::from_micros(passed_us);
        if number % 40 == 0 {
            for limits in &mut limits {
                let mut limit = |most| random.bool().then(|| random.u64(1..most));
                *limits = LimitsEntry {
                    requests_per_minute: limit(300),
                    tokens_per_minute: limit(20_000),
                    input_tokens_per_minute: limit(15_000),
                    output_tokens_per_minute: limit(9_000),
                    requests_in_flight_max: limit(9),
                    ..LimitsEntry::default()
                };
            }
        }
        let (input, output) = (random.u64(0..900) as f64, random.u64(0..600) as f64);
        let old = open.iter().next().cloned();
        let (act, place) = match (random.u8(0..3), old) {
            (0, Some(old)) => (Act::Settle, old),
            (1, Some(old)) => (Act::Reserve, old),
            _ => (Act::Begin, format!("place {number}")),
        };
        let amount = |of: PerMinute| match act {
            Act::Begin => of.of_one_request(),
            Act::Reserve => of.of_tokens(input, output),
            Act::Settle => of.of_tokens(-input, output - 300.0),
        };
        let subjects = [0, 1].map(|at| CountedSubject::new("p", &names[at], limits[at]));
        let eval = ["EVAL", script.as_str()];
        let place_ms = 1_000_000_000;
        let mut call = script::call(eval, act, &place, place_ms, &subjects, &amounts(amount));
        call.arg(start_s + passed_us / 1_000_000)
            .arg(passed_us % 1_000_000);
        let bytes: Vec<u8> = call.query_async(&mut connection).await.unwrap();
        let answer = match act {
            Act::Settle => {
                assert_eq!(bytes, b"-");
                None
            }
            Act::Begin | Act::Reserve => Some(script::parse(&bytes, 2).unwrap()),
        };

        let mut expected = None;
        for (at, usage) in usages.iter_mut().enumerate() {
            usage.follow(&limits[at], 1.0, now);
            let refusal = match act {
                Act::Begin => usage.begin_refusal(&limits[at], now),
                Act::Reserve => usage.refusal(amount, now),
                Act::Settle => None,
            };
            expected = expected.or(refusal.map(|refusal| (at, refusal)));
        }
        let wait_s = |refusal: Option<(usize, Refusal)>| match refusal {
            Some((subject, Refusal::PerMinute { at, wait })) => (subject, at, wait.as_secs_f64()),
            Some((subject, Refusal::InFlight(count))) => (subject, 9, count as f64),
            None => (9, 9, 0.0),
        };
        let (ours, theirs) = (
            wait_s(expected),
            wait_s(answer.as_ref().and_then(|it| it.refusal)),
        );
        assert_eq!(
            (ours.0, ours.1),
            (theirs.0, theirs.1),
            "{number}: {answer:?}"
        );
        assert!(
            (ours.2 - theirs.2).abs() < 1e-5,
            "{number}: {ours:?} {theirs:?}"
        );
        refused += u32::from(expected.is_some());
        granted += u32::from(expected.is_none());
        if expected.is_none() {
            for usage in &mut usages {
                usage.take(amount, now);
                usage.in_flight += u64::from(act == Act::Begin);
                usage.in_flight -= u64::from(act == Act::Settle);
            }
            match act {
                Act::Begin => open.insert(place),
                Act::Reserve => false,
                Act::Settle => open.remove(&place),
            };
        }
        // The change that a settlement makes shows in the next answer.
        for (usage, left) in usages.iter().zip(answer.iter().flat_map(|it| &it.left)) {
            for (bucket, left) in usage.buckets.iter().zip(left) {
                let gap = bucket.map(|bucket| bucket.level_at(now) - left.unwrap());
                assert!(
                    gap.unwrap_or(0.0).abs() < 1e-5,
                    "{number}: {gap:?} {answer:?}"
                );
                assert_eq!(bucket.is_some(), left.is_some());
            }
        }
    }
    assert!(granted > 500 && refused > 500, "{granted} and {refused}");
}

#[tokio::test]
async fn two_gateways_grant_a_limit_once_within_one_percent() {
    let server = RedisServer::plain();
    let (a, b) = (
        Gateway::connected(config(&server), 1.0).await,
        Gateway::connected(config(&server), 1.0).await,
    );
    let limits = LimitsEntry {
        tokens_per_minute: Some(1_000_000),
        ..requests(3_000)
    };
    let began = Instant::now();
    let granted = async |gateway: &Gateway| {
        let mut granted = 0_u32;
        for _ in 0..2_500 {
            if let Some(mut ticket) = gateway.begin(limits).await {
                let reserved = ticket.reserve(100, [100].into_iter(), Instant::now());
                reserved.await.unwrap();
                ticket.made().add(40);
                granted += 1;
            }
        }
        granted
    };
    let (of_a, of_b) = tokio::join!(granted(&a), granted(&b));
    let filled = began.elapsed().as_secs_f64() * 3_000.0 / 60.0;
    let total = f64::from(of_a + of_b);
    assert!(of_a > 500 && of_b > 500, "{of_a} and {of_b}");
    assert!(total >= 3_000.0 * 0.99, "{total}");
    assert!(total <= (3_000.0 + filled) * 1.01, "{total}, {filled}");
    assert_eq!(a.fallbacks() + b.fallbacks(), 0);
    // All of it is settled for 140 tokens a request, whichever gateway has served it.
    until("the tokens are not settled", async || {
        let left = a.left(limits).await[1].unwrap();
        let used = 1_000_000.0 - left;
        let filled = began.elapsed().as_secs_f64() * 1_000_000.0 / 60.0;
        (total * 140.0 - filled..=total * 140.0).contains(&used)
    })
    .await;
}

#[tokio::test]
async fn requests_at_once_are_counted_over_all_gateways() {
    let server = RedisServer::plain();
    let (a, b) = (
        Gateway::connected(config(&server), 1.0).await,
        Gateway::connected(config(&server), 1.0).await,
    );
    let limits = LimitsEntry {
        requests_in_flight_max: Some(3),
        ..LimitsEntry::default()
    };
    let tickets = [
        a.begin(limits).await,
        b.begin(limits).await,
        a.begin(limits).await,
    ];
    assert!(tickets.iter().all(Option::is_some));
    let error = b
        .limiter
        .begin(&acme(limits), Instant::now())
        .await
        .err()
        .unwrap();
    assert!(
        error.message.starts_with("3 requests of your organization"),
        "{}",
        error.message
    );
    drop(tickets);
    until("no place becomes free", async || {
        b.begin(limits).await.is_some()
    })
    .await;
}

#[tokio::test]
async fn a_settlement_counts_once_however_often_it_is_sent() {
    let server = RedisServer::plain();
    let gateway = Gateway::connected(config(&server), 1.0).await;
    let limits = LimitsEntry {
        tokens_per_minute: Some(60),
        ..LimitsEntry::default()
    };
    let subject = (Subject::Tenant(ACME.into()), limits);
    let mut place = gateway.counts.place(&[subject]);
    place.begin().await.unwrap();
    place.reserve(|of| of.of_tokens(50.0, 0.0)).await.unwrap();
    let Shared { link, .. } = &*gateway.counts.shared;
    let back = amounts(|of| of.of_tokens(-20.0, 0.0));
    for _ in 0..3 {
        let call = place.call.clone();
        let sent = link
            .run(|script| call.command(script, Act::Settle, 30_000, &back))
            .await;
        sent.unwrap();
    }
    let left = gateway.left(limits).await[1].unwrap();
    assert!((30.0..40.0).contains(&left), "{left}");
}

#[tokio::test]
async fn without_redis_the_own_share_goes_on_and_redis_is_used_again_when_it_is_back() {
    let mut server = RedisServer::plain();
    let (a, b) = (
        Gateway::connected(config(&server), 0.5).await,
        Gateway::connected(config(&server), 0.5).await,
    );
    let limits = requests(40);
    for _ in 0..20 {
        assert!(a.begin(limits).await.is_some());
    }
    let held = a.begin(limits).await.unwrap();
    server.kill();
    // Half of the limit is spent, so about half of the own share of 20 is left.
    let mut granted = 0;
    for _ in 0..200 {
        granted += u32::from(a.begin(limits).await.is_some());
    }
    assert!((8..=13).contains(&granted), "{granted}");
    assert!(!a.is_up() && a.fallbacks() >= 200);
    // Nobody waits for a server that is away, so one call at most has been sent.
    server.restart();
    a.until_up().await;
    b.until_up().await;
    let fallbacks = a.fallbacks() + b.fallbacks();
    let mut granted = 0;
    for _ in 0..50 {
        granted += u32::from(a.begin(limits).await.is_some());
        granted += u32::from(b.begin(limits).await.is_some());
    }
    // The new server knows nothing of before.
    assert!((40..=44).contains(&granted), "{granted}");
    assert_eq!(a.fallbacks() + b.fallbacks(), fallbacks);
    drop(held);
}

#[tokio::test]
async fn places_are_renewed_by_a_living_gateway_and_expire_with_a_dead_one() {
    let server = RedisServer::plain();
    let short = LimitsRedisConfig {
        places_expire_ms: 4_000,
        ..config(&server)
    };
    let limits = LimitsEntry {
        requests_in_flight_max: Some(1),
        ..LimitsEntry::default()
    };
    let other = short.clone();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let held = runtime.spawn(async move {
        let dying = Gateway::connected(other, 1.0).await;
        dying.begin(limits).await.unwrap()
    });
    let held = held.await.unwrap();
    let living = Gateway::connected(short, 1.0).await;
    for _ in 0..50 {
        assert!(living.begin(limits).await.is_none());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // It settles nothing and renews nothing from now on.
    runtime.shutdown_background();
    until("the place does not expire", async || {
        living.begin(limits).await.is_some()
    })
    .await;
    drop(held);
}

#[tokio::test]
async fn a_server_that_forgot_the_script_gets_it_again() {
    let server = RedisServer::plain();
    let gateway = Gateway::connected(config(&server), 1.0).await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut flush = redis::cmd("SCRIPT");
    flush
        .arg("FLUSH")
        .exec_async(&mut connection)
        .await
        .unwrap();
    assert!(gateway.begin(requests(10)).await.is_some());
    assert_eq!(gateway.fallbacks(), 0);
}

#[tokio::test]
async fn a_password_and_a_certificate_are_used_and_a_wrong_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into()]).unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let certificate = file("certificate.pem", &made.cert.pem());
    let key = file("key.pem", &made.signing_key.serialize_pem());
    let password_file = file("password", "a long password\n");
    let files = [&certificate, &key].map(|path| path.display().to_string());
    let server = RedisServer::start(
        "--tls-port",
        &[
            "--port",
            "0",
            "--tls-cert-file",
            &files[0],
            "--tls-key-file",
            &files[1],
            "--tls-auth-clients",
            "no",
            "--requirepass",
            "a long password",
        ],
    );
    let config = LimitsRedisConfig {
        url: server.url().replace("redis://", "rediss://"),
        ca: Some(certificate),
        ..config(&server)
    };
    let wrong = LimitsRedisConfig {
        password: Some("another".into()),
        ..config.clone()
    };
    let wrong = Gateway::new(wrong, 1.0);
    let right = LimitsRedisConfig {
        password_file: Some(password_file),
        ..config
    };
    let right = Gateway::connected(right, 1.0).await;
    assert!(right.begin(requests(10)).await.is_some());
    assert_eq!(right.fallbacks(), 0);
    assert!(wrong.begin(requests(10)).await.is_some());
    assert_eq!((wrong.is_up(), wrong.fallbacks()), (false, 1));
}

/// The time of a check since it was due.
async fn check(gateway: Arc<Gateway>, caller: Caller, due: Instant) -> Duration {
    let begun = gateway.limiter.begin(&caller, Instant::now()).await;
    let time = due.elapsed();
    drop(begun.unwrap());
    time
}

/// For docs/benchmarks.md. The command is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "it measures the time of checks, and tests nothing"]
async fn the_time_of_ten_thousand_checks_a_second() {
    const CHECKS: u32 = 50_000;
    /// Checks before those that count, for connections, caches and pools of memory to have their sizes.
    const WARM_UP: u32 = 5_000;
    const PERIOD: Duration = Duration::from_micros(100);
    let server = RedisServer::plain();
    let gateway = Arc::new(Gateway::connected(config(&server), 1.0).await);
    let limits = LimitsEntry {
        requests_per_minute: Some(1_000_000),
        tokens_per_minute: Some(1_000_000_000),
        requests_in_flight_max: Some(100_000),
        ..LimitsEntry::default()
    };
    let caller = move |number: u32| Caller {
        tenant: format!("tenant {}", number % 50).parse().unwrap(),
        tenant_limits: limits,
        policy: TenantPolicy::default(),
        key: None,
        fixed_key: None,
    };
    // A thread keeps the pace, because the timers of the runtime know whole milliseconds. Each check counts from the
    // time at which it was due, so that a late one counts.
    let runtime = tokio::runtime::Handle::current();
    let began = Instant::now();
    let checks = {
        let gateway = gateway.clone();
        std::thread::spawn(move || {
            let begin = move |number| {
                let due = began + PERIOD * number;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                runtime.spawn(check(gateway.clone(), caller(number), due))
            };
            (0..CHECKS + WARM_UP).map(begin).collect::<Vec<_>>()
        })
    };
    let checks = tokio::task::spawn_blocking(move || checks.join().unwrap());
    let mut times = Vec::new();
    for check in checks.await.unwrap() {
        times.push(check.await.unwrap());
    }
    times.drain(..WARM_UP as usize);
    let rate = f64::from(CHECKS + WARM_UP) / began.elapsed().as_secs_f64();
    times.sort_unstable();
    let share = |share: f64| times[(times.len() as f64 * share) as usize];
    println!(
        "{rate:.0} checks/s, each with its settlement: p50 {:?}, p99 {:?}, p99.9 {:?}, {} fallbacks",
        share(0.5),
        share(0.99),
        share(0.999),
        gateway.fallbacks()
    );
}
