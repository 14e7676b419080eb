//! `refrain usage`: the usage of tenants, keys and models, as draft stores know it, for bills.

use std::io::Write;

use anyhow::{Context, ensure};
use clap::{Args, Subcommand};
use refrain_lab::text_table::text_table;
use refrain_protocol::usage::{EraseUsageReply, UsageCounts, hour_of, hours_asked, parse_hour};
use refrain_rpc::{
    UsageErased, UsageGrouping, UsageLine, UsageQuery, UsageReplica, erase_usage, read_usage,
};
use refrain_service_kit::clock;

use crate::command;
use crate::store::target::{Access, Target, TargetArgs};

/// Lines that are read at once.
const LINES: usize = 10_000;

/// Arguments of `refrain usage`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct UsageArgs {
    #[command(subcommand)]
    command: Option<UsageCommand>,
    #[command(flatten)]
    report: ReportArgs,
}

#[derive(Subcommand)]
enum UsageCommand {
    /// Erase the usage of a tenant, in the store and in the journals of gateways. Its bills cannot be made any more.
    Erase(EraseArgs),
}

#[derive(Args)]
struct EraseArgs {
    /// Name of the tenant.
    tenant: String,
    #[command(flatten)]
    target: TargetArgs,
}

#[derive(Args, Default)]
struct ReportArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// The first hour, such as 2027-01-01 or 2027-01-01T17:00:00Z, in UTC [default: the first of this month].
    #[arg(long, value_parser = hour)]
    from: Option<u32>,
    /// The end, which is not in the report any more [default: now].
    #[arg(long, value_parser = hour)]
    until: Option<u32>,
    /// Usage of this tenant only.
    #[arg(long)]
    tenant: Option<String>,
    /// Usage of the key with this public id only.
    #[arg(long)]
    key: Option<String>,
    /// Usage of this model only.
    #[arg(long)]
    model: Option<String>,
    /// The columns, separated by commas: at most one of hour, day and month, and any of tenant, key and model.
    #[arg(long, default_value = "day,tenant,key,model", value_parser = UsageGrouping::parse)]
    by: UsageGrouping,
    /// Print comma-separated values with a head.
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

/// How lines are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Table,
    Csv,
    Json,
}

fn hour(text: &str) -> Result<u32, String> {
    let fault = "must be a date such as 2027-01-31, or a time such as 2027-01-31T17:00:00Z";
    parse_hour(text).ok_or_else(|| fault.to_owned())
}

/// Runs the command.
///
/// # Errors
/// The store does not answer or refuses, or the output cannot be written.
pub fn run(args: UsageArgs) -> anyhow::Result<()> {
    command::run(async {
        match args.command {
            Some(UsageCommand::Erase(args)) => erase(&args).await,
            None => {
                let mut stdout = std::io::stdout().lock();
                report(&args.report, &mut stdout).await
            }
        }
    })
}

async fn report(args: &ReportArgs, to: &mut impl Write) -> anyhow::Result<()> {
    let now_hour = hour_of(clock::unix_s());
    let hours = hours_asked(args.from, args.until, now_hour);
    let hours = hours.context("--until must be later than --from")?;
    let query = UsageQuery {
        from_hour: hours.start,
        until_hour: hours.end,
        tenant: args.tenant.clone(),
        key: args.key.clone(),
        model: args.model.clone(),
        grouping: args.by,
        lines_max: LINES,
    };
    let form = match (args.csv, args.json) {
        (true, _) => Form::Csv,
        (_, true) => Form::Json,
        _ => Form::Table,
    };
    let target = Target::open(&args.target, Access::Read).await?;
    let written = write_report(&target.usage_replicas(), query, form, to).await;
    target.close().await;
    written
}

/// Reads and writes part after part, so that a long report needs little memory.
async fn write_report(
    replicas: &[UsageReplica],
    mut query: UsageQuery,
    form: Form,
    to: &mut impl Write,
) -> anyhow::Result<()> {
    let columns = query.grouping.columns();
    let mut rows = Vec::new();
    if form == Form::Csv {
        let head = columns.iter().copied().chain(UsageCounts::NAMES);
        csv::Writer::from_writer(&mut *to).write_record(head)?;
    }
    let mut missing = Vec::new();
    loop {
        let report = read_usage(replicas, &query).await?;
        match form {
            Form::Table => rows.extend(report.data.iter().map(cells)),
            Form::Csv => write_csv(&report.data, to)?,
            Form::Json => {
                for line in &report.data {
                    serde_json::to_writer(&mut *to, line)?;
                    writeln!(to)?;
                }
            }
        }
        missing.extend(report.replicas_missing);
        let Some(next) = report.next_from else { break };
        query.from_hour = parse_hour(&next).context("the store answers with no time")?;
    }
    if form == Form::Table {
        // Short heads for a terminal; the whole names are in the other forms.
        let counts = [
            "requests",
            "input",
            "cached",
            "output",
            "reasoning",
            "drafted",
            "accepted",
        ];
        let head: Vec<&str> = columns.iter().copied().chain(counts).collect();
        write!(to, "{}", text_table(columns.len(), &head, rows))?;
    }
    to.flush()?;
    missing.sort();
    missing.dedup();
    for replica in missing {
        eprintln!("{replica} did not answer; the report has what the other replicas know");
    }
    Ok(())
}

/// The cells of a line, in the order of the columns.
fn cells(line: &UsageLine) -> Vec<String> {
    let UsageLine {
        start,
        tenant,
        key,
        model,
        counts,
    } = line;
    let names = [Some(start), tenant.as_ref(), key.as_ref(), model.as_ref()];
    let names = names.into_iter().flatten().cloned();
    let counts = counts.values().map(|count| count.to_string());
    names.chain(counts).collect()
}

fn write_csv(lines: &[UsageLine], to: &mut impl Write) -> anyhow::Result<()> {
    let mut writer = csv::Writer::from_writer(to);
    for line in lines {
        writer.write_record(cells(line))?;
    }
    Ok(writer.flush()?)
}

async fn erase(args: &EraseArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Write).await?;
    let outcomes = erase_usage(&target.usage_replicas(), &args.tenant).await;
    target.close().await;
    let (mut failed, mut pending) = (0, 0);
    for UsageErased {
        store,
        erased,
        trouble,
    } in outcomes
    {
        match trouble {
            None => {
                let EraseUsageReply { rows, gateways, .. } = erased;
                println!("{store}: {rows} rows of usage erased, and those of {gateways} gateways");
                pending += erased.gateways_pending;
            }
            Some(trouble) => {
                failed += 1;
                eprintln!("{store}: {trouble}");
            }
        }
    }
    ensure!(
        failed == 0,
        "{failed} stores have not erased the usage; repeat the command when they run"
    );
    ensure!(
        pending == 0,
        "a gateway has not answered yet, and erases its usage when it calls the store again"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use refrain_draft_store::DraftStoreConfig;
    use refrain_protocol::usage::{RecordUsageRequest, UsageRow, UsageRowId, UsageTotal};
    use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
    use refrain_service_kit::telemetry::Metrics;

    use super::*;

    fn row(time: &str, tenant: &str, key: &str, output_tokens: u64) -> UsageRow {
        UsageRow {
            id: UsageRowId {
                hour: parse_hour(time).unwrap(),
                tenant: tenant.into(),
                key: key.into(),
                model: "m".into(),
                gateway: 1,
            },
            total: UsageTotal {
                began_ms: 1,
                counts: UsageCounts {
                    requests: 1,
                    input_tokens: 5,
                    output_tokens,
                    ..UsageCounts::default()
                },
            },
        }
    }

    async fn text(args: ReportArgs) -> String {
        let mut text = Vec::new();
        report(&args, &mut text).await.unwrap();
        String::from_utf8(text).unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_report_has_the_same_numbers_in_every_form_and_an_erasure_empties_it() {
        let dir = tempfile::tempdir().unwrap();
        let config = DraftStoreConfig::without_budgets(dir.path().to_owned());
        let auth = MeshAuth::new(&MeshConfig::generate().unwrap()).unwrap();
        let metrics = Metrics::new().unwrap();
        let store = refrain_draft_store::start(config, auth, &metrics)
            .await
            .unwrap();
        let rows = vec![
            row("2027-01-30T10:00:00Z", "acme, \"the\" one", "k", 7),
            row("2027-01-30T11:00:00Z", "acme, \"the\" one", "k", 3),
            row("2027-02-01T00:00:00Z", "bolt", "", 2),
        ];
        let request = RecordUsageRequest {
            gateway: 1,
            rows,
            ..RecordUsageRequest::default()
        };
        refrain_rpc::UsageStore::record_usage(&store.handle(), request)
            .await
            .unwrap();
        store.drain(std::time::Duration::from_secs(5)).await;
        let args = || ReportArgs {
            target: TargetArgs {
                data_dir: Some(dir.path().to_owned()),
                ..TargetArgs::default()
            },
            from: Some(hour("2027-01-01").unwrap()),
            until: Some(hour("2027-03-01").unwrap()),
            ..ReportArgs::default()
        };
        let csv = text(ReportArgs {
            csv: true,
            ..args()
        })
        .await;
        assert_eq!(
            csv,
            "start,tenant,key,model,requests,input_tokens,cached_input_tokens,output_tokens,reasoning_tokens,\
             verified_draft_tokens,accepted_draft_tokens\n\
             2027-01-30T00:00:00Z,\"acme, \"\"the\"\" one\",k,m,2,10,0,10,0,0,0\n\
             2027-02-01T00:00:00Z,bolt,,m,1,5,0,2,0,0,0\n"
        );
        let months = text(ReportArgs {
            csv: true,
            by: UsageGrouping::parse("month").unwrap(),
            ..args()
        })
        .await;
        assert!(
            months.contains("\n2027-02-01T00:00:00Z,1,5,0,2,"),
            "{months}"
        );
        let json = text(ReportArgs {
            json: true,
            tenant: Some("bolt".into()),
            ..args()
        })
        .await;
        let line: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&line["output_tokens"], &line["key"]),
            (&2.into(), &"".into())
        );
        let table = text(args()).await;
        assert!(
            table.contains("bolt") && table.lines().count() >= 3,
            "{table}"
        );
        let erasure = EraseArgs {
            tenant: "bolt".into(),
            target: args().target,
        };
        erase(&erasure).await.unwrap();
        let left = text(ReportArgs {
            csv: true,
            by: UsageGrouping::parse("tenant").unwrap(),
            ..args()
        })
        .await;
        assert!(
            !left.contains("bolt") && left.lines().count() == 2,
            "{left}"
        );
    }
}
