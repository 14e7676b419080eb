//! The options of `refrain tenants` for the standing of a tenant's requests among those of others.

use clap::Args;
use refrain_gateway::tenants::file::TenantEntry;
use refrain_protocol::scheduling::{RequestClass, TenantWeight};

#[derive(Args, Clone, Copy, Default)]
pub(super) struct StandingArgs {
    /// Share of the engines among the tenants that wait, relative to theirs, 0.01 to 100 [default: 1].
    #[arg(long, value_parser = weight)]
    weight: Option<TenantWeight>,
    /// Highest class of requests, interactive or rollout; with the second, all run as rollouts [default: interactive].
    #[arg(long, value_parser = class)]
    class_max: Option<RequestClass>,
    /// Percent of the tokens that may be urgent, by a high priority or a tpot_ms [default: 25].
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    urgent_percent_max: Option<u8>,
}

impl StandingArgs {
    /// Changes a tenant. What is not named stays.
    pub(super) fn apply(self, tenant: &mut TenantEntry) {
        tenant.weight = self.weight.unwrap_or(tenant.weight);
        tenant.class_max = self.class_max.unwrap_or(tenant.class_max);
        tenant.urgent_percent_max = self.urgent_percent_max.or(tenant.urgent_percent_max);
    }
}

fn weight(text: &str) -> Result<TenantWeight, String> {
    let number: f64 = text.parse().map_err(|_| "must be a number".to_owned())?;
    TenantWeight::try_from(number)
}

fn class(text: &str) -> Result<RequestClass, String> {
    let value = serde_json::Value::from(text);
    serde_json::from_value(value).map_err(|_| "must be interactive or rollout".to_owned())
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
        let mut tenant = TenantEntry::default();
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
        ] {
            assert!(set(&bad).is_err(), "{bad:?}");
        }
    }
}
