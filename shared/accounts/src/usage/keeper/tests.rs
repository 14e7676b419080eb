use refrain_service_kit::telemetry::Metrics;

use super::*;
use crate::tenants::Limiter;

fn ended(request: u64) -> RequestCounts {
    RequestCounts {
        request,
        subject: Arc::new(UsageSubject {
            tenant: "a".to_owned(),
            key: String::new(),
            model: "m".to_owned(),
        }),
        at_ms: 5,
        counts: UsageCounts {
            requests: 1,
            output_tokens: 9,
            ..UsageCounts::default()
        },
    }
}

#[tokio::test]
async fn a_request_whose_own_write_fails_or_must_not_be_tried_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Arc::new(AccountMetrics::new(&Metrics::new().unwrap()).unwrap());
    let limiter = Limiter::new(1.0, metrics.clone());
    let keeper = start(dir.path(), 100, limiter.budgets(), &metrics).unwrap();
    let send = async |of| {
        let reply = |reply| Message::Settled {
            of,
            reply: Some(reply),
        };
        keeper.ask(reply).await.unwrap();
    };
    let change = |change: fn(&mut Keeper)| change(keeper.keeper.lock().as_mut().unwrap());

    change(|keeper| keeper.journal.refuse_writes().unwrap());
    let refused = keeper.settle_at_once(ended(1)).unwrap_err();
    assert_eq!(metrics.families.usage_write_failures.get(), 1);
    // Nothing follows a gap until the file is complete again.
    let again = keeper.settle_at_once(ended(2)).unwrap_err();
    send(refused).await;
    send(again).await;
    // The thread holds the file for a moment longer than its answer takes, so this waits for it. A slow write would
    // turn requests away.
    change(|keeper| keeper.at_once_not_before = Instant::now());
    keeper.settle_at_once(ended(3)).unwrap();

    change(|keeper| keeper.at_once_not_before = Instant::now() + Duration::from_secs(3_600));
    send(keeper.settle_at_once(ended(4)).unwrap_err()).await;
    keeper.close().await;
    keeper.settle_at_once(ended(5)).unwrap_err();

    let found = FoundJournal::read(dir.path(), 1).unwrap();
    let book = Book::recovered(found.gateway, found.records);
    let counts: Vec<_> = book.rows().map(|row| row.total.counts).collect();
    let expected = UsageCounts {
        requests: 4,
        output_tokens: 36,
        ..UsageCounts::default()
    };
    assert_eq!(counts, [expected]);
}
