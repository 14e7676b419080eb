//! Services are replaced one after the other while requests run, by those of the same version or of another one.
//!
//! `tests/upgrade/run COMMIT` builds an earlier version and has this test start with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::ensure;
use e2e::{Chat, Client, HttpMesh, Service, wait_until};
use tokio::task::JoinSet;

/// Names the binary of the earlier version.
const EARLIER_VARIABLE: &str = "REFRAIN_TEST_EARLIER_BINARY";

const WORKERS: usize = 2;
/// Clients that send one request after the other.
const CLIENTS: usize = 3;
/// Answers that have to come between two replacements.
const ANSWERS: usize = 4;

fn chat(number: usize) -> Chat {
    let chat = Chat::new(&format!("How many lamps are in stock of kind {number}?"));
    chat.max_tokens(24).endless().set("temperature", 0)
}

/// Clients that send requests until they are stopped.
struct Load {
    is_over: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    clients: JoinSet<anyhow::Result<()>>,
}

impl Load {
    /// Starts the clients. Each compares its answers with those of before.
    fn start(client: &Client, expected: &[String]) -> Self {
        let (is_over, answers) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let (client, expected) = (client.clone(), expected.to_vec());
            let (is_over, answers) = (is_over.clone(), answers.clone());
            clients.spawn(async move {
                for turn in number.. {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let number = turn % expected.len();
                    let text = client.chat(&chat(number)).await?.text;
                    ensure!(text == expected[number], "{text}");
                    answers.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        Load {
            is_over,
            answers,
            clients,
        }
    }

    /// Waits for some more answers.
    async fn answers(&self) {
        let before = self.answers.load(Ordering::Relaxed);
        wait_until("requests are answered", async || {
            (self.answers.load(Ordering::Relaxed) >= before + ANSWERS).then_some(())
        })
        .await;
    }

    /// Lets the last requests end.
    ///
    /// # Errors
    /// One of all the requests failed.
    async fn stop(mut self) -> anyhow::Result<()> {
        self.is_over.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended??;
        }
        Ok(())
    }
}

/// Replaces a service while requests run. The gateway is alone, so its clients wait meanwhile.
async fn replace(
    mesh: &mut HttpMesh,
    service: Service,
    binary: Option<&Path>,
    expected: &[String],
) -> anyhow::Result<()> {
    if service == Service::Gateway {
        mesh.replace(service, binary).await?;
        mesh.ready().await;
        let load = Load::start(&mesh.client(), expected);
        load.answers().await;
        return load.stop().await;
    }
    let load = Load::start(&mesh.client(), expected);
    load.answers().await;
    mesh.replace(service, binary).await?;
    mesh.client_of(service).ready("the new service").await;
    mesh.workers_report(WORKERS).await;
    load.answers().await;
    load.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_while_services_are_replaced() -> anyhow::Result<()> {
    let earlier = std::env::var_os(EARLIER_VARIABLE).map(PathBuf::from);
    let earlier = earlier.as_deref();
    let mut mesh = HttpMesh::start_children_of(earlier, WORKERS, "").await?;
    mesh.workers_report(WORKERS).await;
    let mut expected = Vec::new();
    for number in 0..CLIENTS {
        expected.push(mesh.client().chat(&chat(number)).await?.text);
    }
    wait_until("the outputs are stored", async || {
        let scrape = mesh.scrape(Service::DraftStore).await.ok()?;
        let documents = scrape.sum("refrain_draft_store_documents", &[]);
        (documents >= CLIENTS as f64).then_some(())
    })
    .await;
    // A new gateway in front of earlier services, and back.
    replace(&mut mesh, Service::Gateway, None, &expected).await?;
    replace(&mut mesh, Service::Gateway, earlier, &expected).await?;
    for service in [
        Service::Scheduler,
        Service::DraftStore,
        Service::Worker(0),
        Service::Engine(0),
        Service::Worker(1),
        Service::Engine(1),
        Service::Gateway,
    ] {
        replace(&mut mesh, service, None, &expected).await?;
    }
    // The store of before is open, so new workers draft from what was said then.
    let answer = mesh.client().chat(&chat(0)).await?;
    ensure!(
        answer.text == expected[0] && answer.accepted() > 0,
        "{}",
        answer.body
    );
    mesh.stop().await
}
