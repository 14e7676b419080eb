//! Two schedulers of which one leads, with a real broker.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use e2e::{Answer, Chat, HttpMesh, Service, free_addr, repository, wait_until};
use tokio::process::{Child, Command};

/// A nats-server with JetStream. It is killed when it is dropped.
struct Broker {
    _child: Child,
    url: String,
}

impl Broker {
    fn start(dir: &Path) -> anyhow::Result<Self> {
        let addr = free_addr()?;
        // `tests/run` unpacks it there. Elsewhere it has to be installed.
        let unpacked = repository().join("target/tools/usr/sbin/nats-server");
        let program = match unpacked.exists() {
            true => unpacked,
            false => "nats-server".into(),
        };
        let child = Command::new(program)
            .args(["--jetstream", "--addr", "127.0.0.1", "--port"])
            .arg(addr.port().to_string())
            .arg("--store_dir")
            .arg(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("nats-server is missing: tests/run unpacks it into target/tools")?;
        Ok(Broker {
            _child: child,
            url: format!("nats://{addr}"),
        })
    }
}

/// Waits until exactly this scheduler leads, of those that run.
async fn leads(mesh: &HttpMesh, when: &str, leader: Service, others: &[Service]) {
    wait_until(&format!("{leader:?} leads {when}"), async || {
        let is = async |service| {
            let page = mesh.scrape(service).await.ok()?;
            Some(page.sum("refrain_scheduler_leads", &[]) == 1.0)
        };
        let mut right = is(leader).await?;
        for other in others {
            right &= !is(*other).await?;
        }
        right.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_scheduler_takes_over_and_no_request_is_lost() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let broker = Broker::start(dir.path())?;
    // On a busy machine a leader may renew its record late. It must not lose it here, where nothing has happened.
    let settings = format!(
        "[scheduler.standby]\nservers = [\"{}\"]\nlease_ms = 6000\n",
        broker.url
    );
    let mut mesh = HttpMesh::start_children(2, &settings, &[]).await?;
    let both = [Service::Scheduler, Service::Standby];
    wait_until("a scheduler leads", async || {
        for service in both {
            let page = mesh.scrape(service).await.ok()?;
            if page.sum("refrain_scheduler_leads", &[]) == 1.0 {
                return Some(());
            }
        }
        None
    })
    .await;
    let first = match mesh.scrape(Service::Scheduler).await? {
        page if page.sum("refrain_scheduler_leads", &[]) == 1.0 => Service::Scheduler,
        _ => Service::Standby,
    };
    let other = both[usize::from(first == both[0])];
    leads(&mesh, "at first", first, &[other]).await;
    // Each of these rollouts needs several leases, some of them from the next leader.
    let chat = |number| {
        let chat = Chat::random(number).max_tokens(300);
        chat.set("group", format!("group {number}"))
            .set("chunk_tokens", 32)
    };
    let chats: Vec<Chat> = (0..4).map(chat).collect();
    let expected = mesh.client().chat_all(&chats, "off", 4).await?;
    let client = mesh.client();
    let fault = async {
        wait_until("they run", async || {
            let page = mesh.scrape(first).await.ok()?;
            (page.sum("refrain_scheduler_leases_running", &[]) >= 2.0).then_some(())
        })
        .await;
        mesh.kill(first).await?;
        leads(&mesh, "after a kill", other, &[]).await;
        Ok(())
    };
    let (found, ()) = tokio::try_join!(client.chat_all(&chats, "off", 4), fault)?;
    ensure!(texts(&found) == texts(&expected), "other texts");
    let granted = mesh.scrape(other).await?;
    ensure!(granted.sum("refrain_scheduler_chunks_total", &[]) > 0.0);
    // The one that was killed stands by when it is back, and takes over when the leader ends in order.
    mesh.start_child(first).await?;
    leads(&mesh, "when the other is back", other, &[first]).await;
    wait_until(
        "it knows the workers, and shows no gauge of them",
        async || {
            let page = mesh.scrape(first).await.ok()?;
            (page.sum("refrain_scheduler_workers", &[]) == 0.0).then_some(())
        },
    )
    .await;
    mesh.replace(other, None).await?;
    leads(&mesh, "after an end in order", first, &[other]).await;
    let found = mesh.client().chat_all(&chats, "off", 4).await?;
    ensure!(texts(&found) == texts(&expected), "other texts");
    mesh.stop().await
}

fn texts(answers: &[Answer]) -> Vec<&str> {
    answers.iter().map(|answer| answer.text.as_str()).collect()
}
