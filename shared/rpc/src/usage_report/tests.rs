use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use refrain_protocol::usage::{
    EraseUsageReply, EraseUsageRequest, RecordUsageReply, RecordUsageRequest, UsageRowsReply,
};

use super::*;
use crate::usage_store::UsageStore;

/// A replica that answers two rows at a time, or is away.
struct Fake {
    rows: Vec<UsageRow>,
    is_away: bool,
    calls: Mutex<usize>,
}

#[async_trait]
impl UsageStore for Fake {
    async fn record_usage(&self, _: RecordUsageRequest) -> Result<RecordUsageReply, ApiError> {
        Ok(RecordUsageReply::default())
    }

    async fn usage_rows(&self, request: UsageRowsRequest) -> Result<UsageRowsReply, ApiError> {
        *self.calls.lock().unwrap() += 1;
        if self.is_away {
            return Err(ApiError::new(ErrorKind::Unavailable, "away"));
        }
        let after = request.after;
        let left = self.rows.iter().filter(|row| {
            let hours = request.from_hour..request.until_hour;
            hours.contains(&row.id.hour) && after.as_ref().is_none_or(|after| row.id > *after)
        });
        let rows: Vec<UsageRow> = left.take(2).cloned().collect();
        let next = rows.last().map(|row| row.id.clone());
        Ok(UsageRowsReply { rows, next })
    }

    async fn erase_usage(&self, _: EraseUsageRequest) -> Result<EraseUsageReply, ApiError> {
        Ok(EraseUsageReply::default())
    }
}

fn row(hour: u32, tenant: &str, gateway: u128, output_tokens: u64) -> UsageRow {
    UsageRow {
        id: UsageRowId {
            hour,
            tenant: tenant.into(),
            key: "k".into(),
            model: "m".into(),
            gateway,
        },
        total: UsageTotal {
            began_ms: 1,
            counts: UsageCounts {
                requests: 1,
                output_tokens,
                ..UsageCounts::default()
            },
        },
    }
}

fn replica(name: &str, mut rows: Vec<UsageRow>, is_away: bool) -> UsageReplica {
    rows.sort_by(|left, right| left.id.cmp(&right.id));
    UsageReplica {
        name: name.into(),
        store: Arc::new(Fake {
            rows,
            is_away,
            calls: Mutex::default(),
        }),
    }
}

fn query(grouping: &str) -> UsageQuery {
    UsageQuery {
        until_hour: u32::MAX,
        grouping: UsageGrouping::parse(grouping).unwrap(),
        lines_max: 1_000,
        ..UsageQuery::default()
    }
}

fn tokens(report: &UsageReport) -> Vec<(String, u64)> {
    let lines = report.data.iter();
    let lines = lines.map(|line| {
        let day = line.start[8..10].to_owned();
        (
            day + line.tenant.as_deref().unwrap_or(""),
            line.counts.output_tokens,
        )
    });
    lines.collect()
}

#[tokio::test]
async fn replicas_are_merged_row_by_row_before_they_are_summed() {
    // Each replica lacks something that the other has.
    let one = vec![row(1, "a", 1, 10), row(2, "a", 1, 5), row(30, "b", 2, 7)];
    let two = vec![
        row(1, "a", 1, 12),
        row(2, "a", 1, 3),
        row(2, "a", 2, 100),
        row(30, "a", 1, 1),
    ];
    let replicas = [
        replica("one", one, false),
        replica("two", two, false),
        replica("three", Vec::new(), true),
    ];
    let report = read_usage(&replicas, &query("day,tenant")).await.unwrap();
    let expected = [("01a", 12 + 5 + 100), ("02a", 1), ("02b", 7)];
    let expected = expected.map(|(name, tokens)| (name.to_owned(), tokens));
    assert_eq!(tokens(&report), expected);
    assert_eq!(report.replicas_missing, ["three"]);
    assert_eq!(report.data[0].key, None);
    let all = read_usage(&replicas, &query("tenant")).await.unwrap();
    assert_eq!(all.data.len(), 2);
    assert_eq!(all.data[0].counts.output_tokens, 118);
    assert_eq!(all.data[0].counts.requests, 4);
    let nobody = read_usage(&replicas[2..], &query("day")).await;
    assert_eq!(nobody.unwrap_err().kind, ErrorKind::Unavailable);
    assert!(read_usage(&[], &query("day")).await.is_err());
}

#[tokio::test]
async fn a_long_answer_ends_with_a_period_and_is_continued_there() {
    let rows: Vec<UsageRow> = (0..100)
        .flat_map(|hour| [row(hour, "a", 1, 1), row(hour, "b", 1, 1)])
        .collect();
    let replicas = [replica("one", rows, false)];
    let mut query = UsageQuery {
        lines_max: 3,
        ..query("day,tenant")
    };
    let mut sums = 0;
    let mut parts = 0;
    loop {
        let report = read_usage(&replicas, &query).await.unwrap();
        parts += 1;
        assert!(report.data.len() <= 4, "{report:?}");
        sums += report
            .data
            .iter()
            .map(|line| line.counts.output_tokens)
            .sum::<u64>();
        let Some(next) = report.next_from else { break };
        query.from_hour = refrain_protocol::usage::parse_hour(&next).unwrap();
    }
    assert_eq!((sums, parts), (200, 3));
}

#[test]
fn groupings_are_read_from_lists_of_columns() {
    let grouping = UsageGrouping::parse("month, tenant").unwrap();
    assert_eq!(grouping.columns(), ["start", "tenant"]);
    assert_eq!(grouping.period, Some(Period::Month));
    for faulty in ["", "day,hour", "year", "tenant,,key"] {
        assert!(UsageGrouping::parse(faulty).is_err(), "{faulty}");
    }
}
