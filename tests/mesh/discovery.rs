//! Engines that a file names, with real processes: they come and go while requests run.

use anyhow::ensure;
use e2e::{Answer, Chat, HttpMesh, Service, free_addr, wait_until};

fn texts(answers: &[Answer]) -> Vec<&str> {
    answers.iter().map(|answer| answer.text.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_a_file_names_serve_while_it_names_them() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("engines.txt");
    std::fs::write(&file, "")?;
    // No service of a mesh gets these ports.
    let first_port = free_addr()?.port() - 10_000;
    // A gateway for a trainer is ready without engines.
    let trainer = free_addr()?;
    let settings = format!(
        "[gateway.trainer]\nlisten = \"{trainer}\"\ntenant = \"one\"\n[worker.adoption]\nengines_max = 4\nfinds_kind = false\nfirst_port = {first_port}\n\
         sources = [\"file://{}\"]\nlookup_interval_ms = 100\nabsence_ms_max = 200\n\
         allowed_hosts = []\n[worker]\nevacuate_after_ms = 100\n",
        file.display()
    );
    let mut mesh = HttpMesh::start_children(1, &settings, &[]).await?;
    let engine = mesh.url(Service::Engine(0));
    let served = async |mesh: &HttpMesh, workers: usize| mesh.workers_report(workers).await;
    served(&mesh, 0).await;
    std::fs::write(&file, format!("# the pool\n{engine}\n"))?;
    served(&mesh, 1).await;
    let chats: Vec<Chat> = (0..4)
        .map(|number| Chat::random(number).max_tokens(200))
        .collect();
    let expected = mesh.client().chat_all(&chats, "off", 4).await?;
    // The engine goes and comes back while requests run.
    let client = mesh.client();
    let change = async {
        wait_until("they run", async || {
            let page = mesh.scrape(Service::Scheduler).await.ok()?;
            (page.sum("refrain_scheduler_leases_running", &[]) >= 2.0).then_some(())
        })
        .await;
        std::fs::write(&file, "")?;
        served(&mesh, 0).await;
        std::fs::write(&file, &engine)?;
        Ok(())
    };
    let (found, ()) = tokio::try_join!(client.chat_all(&chats, "off", 4), change)?;
    ensure!(texts(&found) == texts(&expected), "other texts");
    // One that dies comes back by itself, since the source still names it.
    mesh.kill(Service::Engine(0)).await?;
    mesh.start_child(Service::Engine(0)).await?;
    let found = mesh.client().chat_all(&chats, "off", 4).await?;
    ensure!(texts(&found) == texts(&expected), "other texts");
    mesh.stop().await
}
