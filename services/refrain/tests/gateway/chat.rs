//! `refrain chat`: an answer that is interrupted, and a tenant that hides what drafts bring.

use std::process::Stdio;
use std::time::Duration;

use refrain_gateway::GatewayConfig;
use refrain_rpc::testing::FakeTenants;
use reqwest::Method;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use crate::admin::Admin;
use crate::mesh::{Bench, config};

fn chat(url: &str, key: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_refrain"))
        .args(["chat", "--url", url, "--api-key", key])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn an_interrupt_ends_the_answer_and_not_the_program() {
    let bench = Bench::new().await;
    bench.mesh.script().step_pause = Duration::from_millis(300);
    let mut child = chat(&bench.url, "sk-acme");
    let mut questions = child.stdin.take().unwrap();
    let mut answers = child.stdout.take().unwrap();
    let mut notes = BufReader::new(child.stderr.take().unwrap()).lines();
    questions.write_all(b"Hello\n").await.unwrap();
    // The first words are here long before the last ones.
    let mut words = vec![0; 4];
    answers.read_exact(&mut words).await.unwrap();
    let pid = Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    assert_eq!(notes.next_line().await.unwrap().unwrap(), "stopped");
    let series = "refrain_gateway_requests_total{model=\"tiny\",status=\"499\",tenant=\"acme\"}";
    while bench.metric(series) < 1.0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    bench.mesh.script().step_pause = Duration::ZERO;
    questions.write_all(b"Again\n").await.unwrap();
    let told = notes.next_line().await.unwrap().unwrap();
    assert!(told.contains(" engine steps, "), "{told}");
    drop(questions);
    assert!(child.wait().await.unwrap().success());
    let mut rest = String::new();
    answers.read_to_string(&mut rest).await.unwrap();
    assert!(
        rest.ends_with("\nhello world, this is the answer\n"),
        "{rest}"
    );
}

#[tokio::test]
async fn a_tenant_that_hides_what_drafts_bring_gets_plain_answers() {
    let with = GatewayConfig {
        tenants_in_store: true,
        ..config()
    };
    let admin = Admin::with(with, FakeTenants::default()).await;
    let quiet = json!({"name": "quiet", "hides_metrics": true});
    let (status, made) = admin.call(Method::POST, "tenants", quiet).await;
    assert_eq!(status, 201, "{made}");
    let named = json!({"name": "k"});
    let (_, made) = admin.call(Method::POST, "tenants/quiet/keys", named).await;
    let key = made["key"].as_str().unwrap();
    let models = format!("{}/v1/models", admin.bench.url);
    let is_known = async || {
        let request = admin.bench.client.get(&models).bearer_auth(key);
        request.send().await.unwrap().status() == 200
    };
    while !is_known().await {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut child = chat(&admin.bench.url, key);
    let mut questions = child.stdin.take().unwrap();
    questions.write_all(b"Hello\n").await.unwrap();
    drop(questions);
    let output = child.wait_with_output().await.unwrap();
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{notes}");
    assert_eq!(output.stdout, b"hello world, this is the answer\n");
    assert!(
        notes.ends_with(" tokens/s\n") && !notes.contains("step"),
        "{notes}"
    );
}
