use futures_util::FutureExt as _;
use refrain_protocol::usage::UsageCounts;
use refrain_service_kit::telemetry::Metrics;
use tokio::sync::mpsc;

use super::*;
use crate::metrics::AccountMetrics;
use crate::tenants::{Caller, Limiter};
use crate::usage::book::Book;
use crate::usage::journal::FoundJournal;
use crate::usage::keeper;

fn metrics() -> Arc<AccountMetrics> {
    Arc::new(AccountMetrics::new(&Metrics::new().unwrap()).unwrap())
}

fn start(limiter: &Limiter, tenant: &str) -> UsageStart {
    let caller = Caller {
        tenant: tenant.parse().unwrap(),
        tenant_limits: Default::default(),
        policy: Default::default(),
        fixed_key: None,
        key: None,
    };
    let quota = limiter
        .begin(&caller, Instant::now())
        .now_or_never()
        .unwrap()
        .unwrap();
    UsageStart {
        subject: UsageSubject {
            tenant: tenant.to_owned(),
            key: String::new(),
            model: "m".to_owned(),
        },
        input_tokens: 7,
        choices_per_prompt: 2,
        choices: 4,
        budget: quota.budget(),
        shown: Arc::new(metrics().tokens([tenant, tenant], "m")),
    }
}

fn counts(output_tokens: u64) -> UsageCounts {
    UsageCounts {
        requests: 1,
        output_tokens,
        cached_input_tokens: 3,
        ..UsageCounts::default()
    }
}

/// A queue for two messages that nobody reads yet.
fn queue() -> (Usage, mpsc::Receiver<Message>) {
    let (messages, received) = mpsc::channel(2);
    (Usage::kept_by(KeeperHandle::of_queue(messages)), received)
}

#[tokio::test]
async fn a_request_waits_for_room_and_its_last_message_never_does() {
    let limiter = Limiter::new(1.0, metrics());
    let (usage, mut received) = queue();
    let first = usage.begin(start(&limiter, "a")).await.unwrap();
    let second = usage.begin(start(&limiter, "a")).await.unwrap();
    assert!(usage.begin(start(&limiter, "a")).now_or_never().is_none());
    // Without room, progress is left out. The last message has its own.
    first.note(0, counts(5));
    drop(first);
    assert!(usage.begin(start(&limiter, "a")).now_or_never().is_none());
    let Some(Message::Settled { of, reply: None }) = received.recv().await else {
        panic!("no settlement");
    };
    let expected = UsageCounts {
        input_tokens: 7,
        ..counts(5)
    };
    assert_eq!(of.counts, expected);
    // A request that made nothing leaves no message, and its room is free again.
    drop(second);
    let third = usage.begin(start(&limiter, "a")).await.unwrap();
    drop(third);
    assert!(received.try_recv().is_err());
}

#[tokio::test]
async fn choices_are_summed_and_cached_tokens_count_once_per_prompt() {
    let limiter = Limiter::new(1.0, metrics());
    let (usage, mut received) = queue();
    let meter = usage.begin(start(&limiter, "a")).await.unwrap();
    for choice in 0..4 {
        meter.end_choice(choice, counts(10));
    }
    drop(meter);
    let Some(Message::Settled { of, reply: None }) = received.recv().await else {
        panic!("no settlement");
    };
    let expected = UsageCounts {
        requests: 1,
        input_tokens: 7,
        cached_input_tokens: 6,
        output_tokens: 40,
        ..UsageCounts::default()
    };
    assert_eq!(of.counts, expected);
}

#[tokio::test]
async fn an_answer_waits_until_its_counts_are_in_the_file() {
    let limiter = Limiter::new(1.0, metrics());
    let (usage, mut received) = queue();
    let meter = usage.begin(start(&limiter, "a")).await.unwrap();
    meter.end_choice(0, counts(5));
    let mut settled = Box::pin(meter.settle());
    assert!(settled.as_mut().now_or_never().is_none());
    let Some(Message::Settled { of, reply }) = received.recv().await else {
        panic!("no settlement");
    };
    assert_eq!(of.counts.output_tokens, 5);
    reply.unwrap().send(()).unwrap();
    settled.await;
    // It is settled once.
    drop(meter);
    assert!(received.try_recv().is_err());

    let [dir, copy] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let keeper = keeper::start(dir.path(), 100, limiter.budgets(), &metrics()).unwrap();
    let usage = Usage::kept_by(keeper);
    let mut at_once = 0;
    for requests in 1..=50 {
        let meter = usage.begin(start(&limiter, "a")).await.unwrap();
        meter.end_choice(0, counts(5));
        let mut settled = Box::pin(meter.settle());
        match settled.as_mut().now_or_never() {
            // The request has written to the file itself.
            Some(()) => at_once += 1,
            None => settled.await,
        }
        std::fs::copy(dir.path().join("journal"), copy.path().join("journal")).unwrap();
        let found = FoundJournal::read(copy.path(), 1).unwrap();
        assert_eq!(found.records.len(), requests);
    }
    // A slow write keeps later requests from it.
    assert!(at_once > 0);
}

#[test]
fn progress_is_due_after_tokens_or_time() {
    let begin = Instant::now();
    let mut clock = ProgressClock::new(begin);
    assert!(!clock.is_due(PROGRESS_TOKENS - 1, begin));
    assert!(clock.is_due(PROGRESS_TOKENS, begin));
    assert!(!clock.is_due(PROGRESS_TOKENS + 1, begin));
    assert!(clock.is_due(PROGRESS_TOKENS + 1, begin + PROGRESS_TIME));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_write_themselves_and_those_of_the_thread_are_all_in_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = metrics();
    let limiter = Arc::new(Limiter::new(1.0, metrics.clone()));
    let keeper = keeper::start(dir.path(), 100, limiter.budgets(), &metrics).unwrap();
    let usage = Usage::kept_by(keeper.clone());
    let ask = |asker: u64| {
        let (usage, limiter) = (usage.clone(), limiter.clone());
        tokio::spawn(async move {
            for number in 0..500 {
                let meter = usage.begin(start(&limiter, "a")).await.unwrap();
                if (number + asker).is_multiple_of(3) {
                    meter.note(0, counts(4));
                }
                meter.end_choice(0, counts(9));
                match number % 2 {
                    0 => meter.settle().await,
                    _ => drop(meter),
                }
            }
        })
    };
    for asker in [0, 1, 2, 3].map(ask) {
        asker.await.unwrap();
    }
    keeper.close().await;
    let sums = sums(dir.path());
    assert_eq!((sums.requests, sums.output_tokens), (2_000, 18_000));
}

/// The sum of all that a journal counts.
fn sums(dir: &std::path::Path) -> UsageCounts {
    let found = FoundJournal::read(dir, 1).unwrap();
    let book = Book::recovered(found.gateway, found.records);
    let rows = book.rows().map(|row| row.total.counts);
    rows.fold(UsageCounts::default(), UsageCounts::plus)
}

/// Many short requests at once: nothing is lost, and the time that each pays is printed.
#[tokio::test]
async fn every_request_is_in_the_journal_and_the_time_of_one_is_printed() {
    const REQUESTS: u64 = 20_000;
    let dir = tempfile::tempdir().unwrap();
    let metrics = metrics();
    let limiter = Limiter::new(1.0, metrics.clone());
    let keeper = keeper::start(dir.path(), 100, limiter.budgets(), &metrics).unwrap();
    let usage = Usage::kept_by(keeper.clone());
    let began = Instant::now();
    for number in 0..REQUESTS {
        let tenant = ["a", "b", "c"][number as usize % 3];
        let meter = usage.begin(start(&limiter, tenant)).await.unwrap();
        meter.note(0, counts(4));
        meter.end_choice(0, counts(9));
    }
    let each = began.elapsed() / REQUESTS as u32;
    eprintln!("usage of a request with one progress: {each:?} in this build");
    keeper.close().await;
    let expected = UsageCounts {
        requests: REQUESTS,
        input_tokens: 7 * REQUESTS,
        cached_input_tokens: 3 * REQUESTS,
        output_tokens: 9 * REQUESTS,
        ..UsageCounts::default()
    };
    assert_eq!(sums(dir.path()), expected);
}
