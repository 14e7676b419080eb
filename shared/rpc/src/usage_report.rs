//! Reads usage from all replicas as one, and groups it.
//!
//! Replicas answer rows in the same order, so they are merged as they come, and memory holds the groups of one period
//! only. A store does not group by itself: a replica may lack what another has, and only single rows can be merged
//! exactly.

use std::collections::{BTreeMap, VecDeque};

use refrain_protocol::usage::{
    Period, UsageCounts, UsageRow, UsageRowId, UsageRowsRequest, UsageTotal,
};
use refrain_protocol::{ApiError, ErrorKind};
use serde::Serialize;

use crate::usage_store::UsageReplica;

/// Rows of one page.
const PAGE_ROWS: u32 = 4_096;

/// Most groups of one period.
const GROUPS_MAX: usize = 100_000;

/// The columns by which usage is grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageGrouping {
    /// `None` for the whole range together.
    pub period: Option<Period>,
    /// Whether tenants are told apart.
    pub by_tenant: bool,
    /// Whether keys are told apart.
    pub by_key: bool,
    /// Whether models are told apart.
    pub by_model: bool,
}

impl Default for UsageGrouping {
    fn default() -> Self {
        UsageGrouping {
            period: Some(Period::Day),
            by_tenant: true,
            by_key: true,
            by_model: true,
        }
    }
}

impl UsageGrouping {
    /// Reads a list such as `day,tenant,model`. At most one of `hour`, `day` and `month` may be in it.
    ///
    /// # Errors
    /// The word that is not known, or comes too often.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut grouping = UsageGrouping {
            period: None,
            by_tenant: false,
            by_key: false,
            by_model: false,
        };
        for word in text.split(',').map(str::trim) {
            let period = match word {
                "hour" => Some(Period::Hour),
                "day" => Some(Period::Day),
                "month" => Some(Period::Month),
                "tenant" => {
                    grouping.by_tenant = true;
                    None
                }
                "key" => {
                    grouping.by_key = true;
                    None
                }
                "model" => {
                    grouping.by_model = true;
                    None
                }
                other => {
                    return Err(format!(
                        "{other:?} is none of hour, day, month, tenant, key and model"
                    ));
                }
            };
            if period.is_some() && grouping.period.is_some() {
                return Err("give one of hour, day and month".to_owned());
            }
            grouping.period = grouping.period.or(period);
        }
        Ok(grouping)
    }

    /// The names of the columns before the counts.
    pub fn columns(self) -> Vec<&'static str> {
        let columns = [
            (true, "start"),
            (self.by_tenant, "tenant"),
            (self.by_key, "key"),
            (self.by_model, "model"),
        ];
        let shown = columns.into_iter().filter(|(is_shown, _)| *is_shown);
        shown.map(|(_, name)| name).collect()
    }
}

/// A question for usage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageQuery {
    /// The first hour, in hours since 1970.
    pub from_hour: u32,
    /// The hour after the last one.
    pub until_hour: u32,
    /// Usage of this tenant only.
    pub tenant: Option<String>,
    /// Usage of this key only.
    pub key: Option<String>,
    /// Usage of this model only.
    pub model: Option<String>,
    /// The columns of the answer.
    pub grouping: UsageGrouping,
    /// Lines after which the answer ends with the period, and says where to go on.
    pub lines_max: usize,
}

/// A line of usage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UsageLine {
    /// The beginning of the period, as in RFC 3339.
    pub start: String,
    /// The tenant, if tenants are told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The public id of the key, if keys are told apart. Empty for callers without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The model, if models are told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The sums.
    #[serde(flatten)]
    pub counts: UsageCounts,
}

/// The answer to a [`UsageQuery`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UsageReport {
    /// The lines, in order of time, tenant, key and model.
    pub data: Vec<UsageLine>,
    /// The beginning of the next part, if there may be more.
    pub next_from: Option<String>,
    /// Replicas that did not answer. Others usually have the same rows.
    pub replicas_missing: Vec<String>,
}

/// A group, by period, tenant, key and model. Columns that are not told apart are empty.
type GroupId = (u32, String, String, String);

/// The rows of one replica, page by page.
struct Rows<'a> {
    replica: &'a UsageReplica,
    request: UsageRowsRequest,
    page: VecDeque<UsageRow>,
    is_done: bool,
}

impl Rows<'_> {
    /// Has a row ready, unless all were read.
    async fn fill(&mut self) -> Result<(), ApiError> {
        while self.page.is_empty() && !self.is_done {
            let reply = self.replica.store.usage_rows(self.request.clone()).await?;
            self.page = reply.rows.into();
            self.is_done = reply.next.is_none();
            self.request.after = reply.next;
        }
        Ok(())
    }
}

/// Reads usage from all replicas.
///
/// # Errors
/// `Unavailable` if no replica answers, `TooLarge` if one period has too many groups.
pub async fn read_usage(
    replicas: &[UsageReplica],
    query: &UsageQuery,
) -> Result<UsageReport, ApiError> {
    let request = UsageRowsRequest {
        from_hour: query.from_hour,
        until_hour: query.until_hour,
        tenant: query.tenant.clone(),
        key: query.key.clone(),
        model: query.model.clone(),
        after: None,
        rows_max: PAGE_ROWS,
    };
    let rows = replicas.iter().map(|replica| Rows {
        replica,
        request: request.clone(),
        page: VecDeque::new(),
        is_done: false,
    });
    let mut rows: Vec<Rows<'_>> = rows.collect();
    let mut report = UsageReport::default();
    let mut groups = BTreeMap::new();
    let mut trouble = None;
    let period_of = |hour| {
        query
            .grouping
            .period
            .map_or(0, |period| period.number(hour))
    };
    let mut present = None;
    loop {
        let filled = rows.iter_mut().map(Rows::fill);
        let filled = futures_util::future::join_all(filled).await;
        let mut filled = filled.into_iter();
        rows.retain(|of| match filled.next() {
            Some(Err(error)) => {
                report.replicas_missing.push(of.replica.name.clone());
                trouble = Some(error);
                false
            }
            _ => true,
        });
        if rows.is_empty() {
            let none = || ApiError::new(ErrorKind::Unavailable, "no draft store keeps usage");
            return Err(trouble.unwrap_or_else(none));
        }
        let Some((id, counts)) = take_first(&mut rows) else {
            break;
        };
        let period = period_of(id.hour);
        if present.is_some_and(|present| present != period) {
            finish_period(&mut groups, query, &mut report);
            if report.data.len() >= query.lines_max {
                report.next_from = Some(Period::Hour.start_text(id.hour));
                return Ok(report);
            }
        }
        present = Some(period);
        let kept = |is_kept: bool, text: String| if is_kept { text } else { String::new() };
        let group: GroupId = (
            period,
            kept(query.grouping.by_tenant, id.tenant),
            kept(query.grouping.by_key, id.key),
            kept(query.grouping.by_model, id.model),
        );
        let sum: &mut UsageCounts = groups.entry(group).or_default();
        *sum = sum.plus(counts);
        if groups.len() > GROUPS_MAX {
            let message = format!(
                "more than {GROUPS_MAX} lines for one period: group by fewer columns, or name a tenant"
            );
            return Err(ApiError::new(ErrorKind::TooLarge, message));
        }
    }
    finish_period(&mut groups, query, &mut report);
    Ok(report)
}

/// Takes the first row of all, as the replicas that have it say together.
fn take_first(rows: &mut [Rows<'_>]) -> Option<(UsageRowId, UsageCounts)> {
    let fronts = rows.iter().filter_map(|of| of.page.front());
    let first = fronts.map(|row| &row.id).min()?.clone();
    let mut total = UsageTotal::default();
    for of in rows {
        if of.page.front().is_some_and(|row| row.id == first)
            && let Some(row) = of.page.pop_front()
        {
            total = total.merge(row.total);
        }
    }
    Some((first, total.counts))
}

/// Writes the lines of a period that has ended.
fn finish_period(
    groups: &mut BTreeMap<GroupId, UsageCounts>,
    query: &UsageQuery,
    report: &mut UsageReport,
) {
    let UsageGrouping {
        period,
        by_tenant,
        by_key,
        by_model,
    } = query.grouping;
    let start = |number: u32| match period {
        Some(period) => period.start_text(number),
        None => Period::Hour.start_text(query.from_hour),
    };
    let lines = std::mem::take(groups).into_iter();
    let lines = lines.map(|((number, tenant, key, model), counts)| UsageLine {
        start: start(number),
        tenant: by_tenant.then_some(tenant),
        key: by_key.then_some(key),
        model: by_model.then_some(model),
        counts,
    });
    report.data.extend(lines);
}

#[cfg(test)]
mod tests;
