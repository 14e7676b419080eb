//! The options of `refrain tenants` for the standing of a tenant's requests among those of others.

use clap::Args;
use refrain_accounts::tenants::file::{Isolation, StreamShaping, TenantEntry};
use refrain_protocol::scheduling::{RequestClass, TenantWeight};
use serde::de::DeserializeOwned;

#[derive(Args, Clone, Copy, Default)]
pub(super) struct StandingArgs {
    /// Share of the engines among the tenants that wait, relative to theirs, 0.01 to 100 [default: 1].
    #[arg(long, value_parser = weight)]
    weight: Option<TenantWeight>,
    /// Highest class of requests, interactive or rollout; with the second, all run as rollouts [default:
    /// interactive].
    #[arg(long, value_parser = named::<RequestClass>)]
    class_max: Option<RequestClass>,
    /// Percent of the tokens that may be urgent, by a high priority or a tpot_ms [default: 25].
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    urgent_percent_max: Option<u8>,
    /// How far drafts and KV caches reach: tenant, key or user [default: tenant].
    #[arg(long, value_parser = named::<Isolation>)]
    isolation: Option<Isolation>,
    /// The events of streams: off, size (equal numbers of tokens) or pace (and at equal times) [default:
    /// off].
    #[arg(long, value_parser = named::<StreamShaping>)]
    stream_shaping: Option<StreamShaping>,
    /// Milliseconds per token of paced streams [default: 40].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    stream_pace_ms: Option<u16>,
    /// Whether answers are without metrics, true or false [default: false].
    #[arg(long)]
    hides_metrics: Option<bool>,
    /// Draft tokens that each token of a match allows, above 0 [default: what the worker has].
    #[arg(long)]
    alpha: Option<f32>,
    /// Least probability of a draft token, 0 to 1 [default: what the worker has].
    #[arg(long)]
    min_token_prob: Option<f32>,
    /// Most draft tokens of a request in a step; 0 turns drafts off [default: what the worker has].
    #[arg(long)]
    max_spec_tokens: Option<u32>,
}

impl StandingArgs {
    /// Changes a tenant. Values that are not named stay.
    pub(super) fn apply(self, tenant: &mut TenantEntry) {
        tenant.weight = self.weight.unwrap_or(tenant.weight);
        tenant.class_max = self.class_max.unwrap_or(tenant.class_max);
        tenant.urgent_percent_max = self.urgent_percent_max.or(tenant.urgent_percent_max);
        tenant.isolation = self.isolation.unwrap_or(tenant.isolation);
        tenant.stream_shaping = self.stream_shaping.unwrap_or(tenant.stream_shaping);
        tenant.stream_pace_ms = self.stream_pace_ms.or(tenant.stream_pace_ms);
        tenant.hides_metrics = self.hides_metrics.unwrap_or(tenant.hides_metrics);
        tenant.alpha = self.alpha.or(tenant.alpha);
        tenant.min_token_prob = self.min_token_prob.or(tenant.min_token_prob);
        tenant.max_spec_tokens = self.max_spec_tokens.or(tenant.max_spec_tokens);
    }
}

fn weight(text: &str) -> Result<TenantWeight, String> {
    let number: f64 = text.parse().map_err(|_| "must be a number".to_owned())?;
    TenantWeight::try_from(number)
}

/// A value by the name that the file has for it. The error lists the names.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let value = serde_json::Value::from(text);
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        standing: StandingArgs,
    }

    #[test]
    fn what_is_not_named_stays_as_it_was() {
        let mut tenant = TenantEntry::named("acme".parse().unwrap());
        let mut set = |args: &[&str]| {
            let all = std::iter::once("tenants").chain(args.iter().copied());
            Command::try_parse_from(all).map(|command| command.standing.apply(&mut tenant))?;
            let values = (
                f64::from(tenant.weight),
                tenant.class_max,
                tenant.urgent_percent_max,
            );
            Ok::<_, clap::Error>(values)
        };
        use RequestClass::{Interactive, Rollout};
        assert_eq!(set(&[]).unwrap(), (1.0, Interactive, None));
        assert_eq!(set(&["--weight", "0.5"]).unwrap(), (0.5, Interactive, None));
        let both = ["--class-max", "rollout", "--urgent-percent-max", "0"];
        assert_eq!(set(&both).unwrap(), (0.5, Rollout, Some(0)));
        assert_eq!(set(&["--weight", "1"]).unwrap(), (1.0, Rollout, Some(0)));
        for bad in [
            ["--weight", "0"],
            ["--weight", "NaN"],
            ["--class-max", "batch"],
            ["--urgent-percent-max", "101"],
            ["--isolation", "session"],
            ["--stream-pace-ms", "0"],
        ] {
            assert!(set(&bad).is_err(), "{bad:?}");
        }
        set(&["--alpha", "2.5", "--max-spec-tokens", "16"]).unwrap();
        set(&["--min-token-prob", "0.25"]).unwrap();
        let secret = [
            "--isolation",
            "user",
            "--stream-shaping",
            "pace",
            "--hides-metrics",
            "true",
        ];
        set(&secret).unwrap();
        set(&["--weight", "2"]).unwrap();
        assert_eq!(
            (tenant.alpha, tenant.max_spec_tokens),
            (Some(2.5), Some(16))
        );
        assert_eq!(tenant.min_token_prob, Some(0.25));
        assert_eq!(tenant.isolation, Isolation::User);
        assert_eq!(tenant.stream_shaping, StreamShaping::Pace);
        assert!(tenant.hides_metrics);
    }
}
