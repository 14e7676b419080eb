//! Limits that gateways count together in Redis, over HTTP.

use std::time::Instant;

use refrain_accounts::tenants::LimitsRedisConfig;
use refrain_accounts::tenants::file::LimitsEntry;
use refrain_gateway::GatewayConfig;
use serde_json::json;

use crate::mesh::{Bench, chat, eventually};
use crate::redis_server::RedisServer;
use crate::tenants::Tenants;

const CHAT: &str = "/v1/chat/completions";
const UP: &str = "refrain_gateway_limits_redis_up ";

async fn until_up(gateway: &Bench, up: f64) {
    eventually("the gauge changes", async || gateway.metric(UP) == up).await;
}

/// How many of `count` requests each gateway answers.
async fn served(gateways: &[Bench], count: usize) -> usize {
    let mut served = 0;
    for _ in 0..count {
        for gateway in gateways {
            let (status, body) = gateway.json(CHAT, &chat(json!({}))).await;
            assert!(status == 200 || status == 429, "{status}: {body}");
            served += usize::from(status == 200);
        }
    }
    served
}

/// The gateways answer six, and one more for each ten seconds that this takes.
async fn full_limits_are_shared(gateways: &[Bench]) {
    let began = Instant::now();
    let together = served(gateways, 7).await;
    let most = 7 + began.elapsed().as_secs() as usize / 10;
    assert!((6..=most).contains(&together), "{together}");
}

#[tokio::test]
async fn two_gateways_share_a_limit_and_answer_while_redis_is_frozen_or_gone() {
    let mut server = RedisServer::plain();
    let tenants = Tenants::new(LimitsEntry {
        requests_per_minute: Some(6),
        tokens_per_minute: Some(100_000),
        ..LimitsEntry::default()
    });
    let config = GatewayConfig {
        limits_redis: Some(LimitsRedisConfig {
            url: server.url(),
            timeout_ms: 500,
            ..LimitsRedisConfig::default()
        }),
        limit_share: 0.5,
        ..tenants.config()
    };
    let gateways = [Bench::with(config.clone()).await, Bench::with(config).await];
    for gateway in &gateways {
        until_up(gateway, 1.0).await;
    }
    full_limits_are_shared(&gateways).await;
    for (signal, after) in [("STOP", "CONT"), ("KILL", "")] {
        match signal {
            "KILL" => server.kill(),
            signal => server.signal(signal),
        }
        let error_status = served(&gateways, 3).await;
        assert!(error_status <= 6, "{error_status}");
        for gateway in &gateways {
            until_up(gateway, 0.0).await;
            assert!(gateway.metric("refrain_gateway_limits_redis_fallbacks_total ") > 0.0);
        }
        match after {
            "" => server.restart(),
            after => server.signal(after),
        }
        for gateway in &gateways {
            until_up(gateway, 1.0).await;
        }
    }
    // The new server begins with full limits.
    full_limits_are_shared(&gateways).await;
}
