//! `GET /admin/usage`: usage as the draft stores know it, for operators.

use actix_web::{HttpRequest, HttpResponse, web};
use refrain_protocol::ApiError;
use refrain_protocol::usage::{hour_of, hours_asked, parse_hour};
use refrain_rpc::{UsageGrouping, UsageQuery, read_usage};
use refrain_service_kit::clock::unix_s;
use refrain_service_kit::http::HttpResult;
use serde::Deserialize;

use super::operators::Operator;
use super::state::AdminState;

/// Lines of an answer, and the most that may be asked for.
const LINES: usize = 1_000;
const LINES_MAX: usize = 10_000;

/// The parameters of a request.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct UsageParameters {
    from: Option<String>,
    until: Option<String>,
    tenant: Option<String>,
    key: Option<String>,
    model: Option<String>,
    group_by: Option<String>,
    limit: Option<usize>,
}

/// Answers with lines of usage.
pub(super) async fn report(
    state: web::Data<AdminState>,
    _: Operator,
    request: HttpRequest,
) -> HttpResult<HttpResponse> {
    let query = query(request.query_string(), hour_of(unix_s()))?;
    let report = read_usage(&state.parts.store.usage_replicas(), &query).await?;
    Ok(HttpResponse::Ok().json(report))
}

/// The question of a request. Without times it is about the present month.
fn query(text: &str, now_hour: u32) -> Result<UsageQuery, ApiError> {
    let parameters = web::Query::<UsageParameters>::from_query(text);
    let parameters = parameters.map_err(|error| ApiError::invalid("query", error.to_string()))?;
    let UsageParameters {
        from,
        until,
        tenant,
        key,
        model,
        group_by,
        limit,
    } = parameters.into_inner();
    let hour = |param: &str, text: Option<String>| {
        let fault = || {
            let message =
                "must be a date such as 2027-01-31, or a time such as 2027-01-31T17:00:00Z, in UTC";
            ApiError::invalid(param, message)
        };
        text.map(|text| parse_hour(&text).ok_or_else(fault))
            .transpose()
    };
    let hours = hours_asked(hour("from", from)?, hour("until", until)?, now_hour);
    let hours = hours.ok_or_else(|| ApiError::invalid("until", "must be later than from"))?;
    let grouping = match group_by {
        None => UsageGrouping::default(),
        Some(text) => {
            UsageGrouping::parse(&text).map_err(|fault| ApiError::invalid("group_by", fault))?
        }
    };
    let lines_max = limit.unwrap_or(LINES);
    if !(1..=LINES_MAX).contains(&lines_max) {
        let message = format!("must be between 1 and {LINES_MAX}");
        return Err(ApiError::invalid("limit", message));
    }
    Ok(UsageQuery {
        from_hour: hours.start,
        until_hour: hours.end,
        tenant,
        key,
        model,
        grouping,
        lines_max,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read_and_faults_name_them() {
        let now = parse_hour("2027-03-05T10:00:00Z").unwrap();
        let default = query("", now).unwrap();
        assert_eq!(default.from_hour, parse_hour("2027-03-01").unwrap());
        assert_eq!(default.until_hour, now + 1);
        assert_eq!(default.lines_max, LINES);
        let text =
            "from=2027-01-01&until=2027-02-01T00:00:00Z&tenant=acme&group_by=month,model&limit=5";
        let asked = query(text, now).unwrap();
        assert_eq!(asked.tenant.as_deref(), Some("acme"));
        assert_eq!(asked.until_hour - asked.from_hour, 31 * 24);
        assert_eq!(asked.grouping.columns(), ["start", "model"]);
        for (text, param) in [
            ("from=yesterday", "from"),
            ("from=2027-02-01&until=2027-02-01", "until"),
            ("group_by=colour", "group_by"),
            ("limit=0", "limit"),
            ("tenants=acme", "query"),
        ] {
            let error = query(text, now).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{text}");
        }
    }
}
