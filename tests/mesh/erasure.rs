//! Everything of a tenant is erased, wherever a mesh keeps it, and the command proves it.

use std::path::Path;

use anyhow::{Context as _, ensure};
use e2e::{Chat, Client, HttpMesh, Program, Service, wait_until};
use serde_json::{Value, json};

/// Words that only requests of the erased tenant have.
const SESSION: &str = "session-of-the-erased-tenant";
const GROUP: &str = "group-of-the-erased-tenant";

/// The file of the engine's pool of KV blocks.
const POOL_FILE: &str = "engine.kvpool";

/// Tokens of a block.
const BLOCK_TOKENS: usize = 32;

/// Runs `refrain` with these words on the store of a mesh. Returns its output.
async fn refrain(mesh: &HttpMesh, words: &[&str]) -> anyhow::Result<String> {
    let url = mesh.url(Service::DraftStore);
    let arguments = [words, &["--url", &url]].concat();
    let variables = [("REFRAIN_MESH__SECRET", &*mesh.keys().secret)];
    let mut program = Program::start(mesh.dir(), &arguments, &variables)?;
    let status = program.ended().await?;
    ensure!(status.success(), "{words:?}: {}", program.output());
    Ok(program.output())
}

/// The requests of a tenant in all reports of usage.
async fn requests(mesh: &HttpMesh, tenant: &str) -> anyhow::Result<u64> {
    let words = ["usage", "--tenant", tenant, "--by", "tenant", "--json"];
    let report = refrain(mesh, &words).await?;
    let lines = report
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    Ok(lines
        .filter_map(|line: Value| line["requests"].as_u64())
        .sum())
}

/// The files under a folder that have one of these words.
fn files_with(dir: &Path, words: &[&str]) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files_with(&path, words)?);
            continue;
        }
        // Files come and go while services run.
        let bytes = std::fs::read(&path).unwrap_or_default();
        let has = |word: &&&str| {
            bytes
                .windows(word.len())
                .any(|part| part == word.as_bytes())
        };
        found.extend(words.iter().find(has).map(|_| path.display().to_string()));
    }
    Ok(found)
}

/// Stores a response, and returns its id.
async fn stored_response(client: &Client) -> anyhow::Result<String> {
    let body = json!({"model": "refrain-tiny", "input": "How many lamps are in stock?", "max_output_tokens": 8});
    let reply = client.post("/v1/responses", body.to_string()).await?;
    let id = reply.json()["id"].as_str().map(str::to_owned);
    id.with_context(|| format!("{reply:?}"))
}

/// Sends a chat. Returns the last full block of its KV cache, as the engine's file has the tokens.
async fn block_of(client: &Client, chat: &Chat) -> anyhow::Result<Vec<u8>> {
    let chat = chat.clone().set("return_token_ids", true);
    let answer = client.chat(&chat).await?.body;
    let lists = [
        &answer["prompt_token_ids"],
        &answer["choices"][0]["token_ids"],
    ];
    let ids = lists.iter().filter_map(|list| list.as_array()).flatten();
    let ids: Vec<u32> = ids.filter_map(Value::as_u64).map(|id| id as u32).collect();
    // The forward pass of the last token is outstanding.
    let full = ids.len().saturating_sub(1) / BLOCK_TOKENS * BLOCK_TOKENS;
    ensure!(full > 0, "no block: {answer}");
    let block = ids[full - BLOCK_TOKENS..full].iter();
    Ok(block.flat_map(|token| token.to_le_bytes()).collect())
}

fn has_block(mesh: &HttpMesh, block: &[u8]) -> bool {
    let file = std::fs::read(mesh.dir().join(POOL_FILE)).unwrap_or_default();
    file.windows(block.len()).any(|part| part == block)
}

async fn is_readable(client: &Client, id: &str) -> anyhow::Result<bool> {
    Ok(client.get(&format!("/v1/responses/{id}")).await?.status == 200)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_an_erased_tenant_is_left_and_others_keep_theirs() -> anyhow::Result<()> {
    let settings = "[gateway]\nusage_dir = \"usage\"\n\
                    keys = [{ key = \"key-of-acme\", tenant = \"acme\" }, { key = \"key-of-bolt\", tenant = \"bolt\" }]\n\
                    [engine.kv_pool]\nmemory_bytes_max = 67_108_864\nfile = \"engine.kvpool\"\n\
                    [worker.uploader]\ninterval_ms = 3_000\ngroup_interval_ms = 3_000\n";
    let mesh = HttpMesh::start_children(1, settings, &[]).await?;
    mesh.workers_report(1).await;
    let url = mesh.url(Service::Gateway);
    let [acme, bolt] = ["key-of-acme", "key-of-bolt"].map(|key| Client::new(&url, key));
    let chat = Chat::new("How many lamps are in stock?")
        .max_tokens(40)
        .endless()
        .set("temperature", 0)
        .speculation("suffix");
    let named = chat.clone().set("session", SESSION).set("group", GROUP);
    let drawn = chat.clone().set("temperature", 1).set("seed", 5);
    let blocks = [
        block_of(&acme, &named).await?,
        block_of(&bolt, &drawn).await?,
    ];
    ensure!(blocks[0] != blocks[1]);
    let responses = [stored_response(&acme).await?, stored_response(&bolt).await?];
    wait_until("the outputs and the usage are in the store", async || {
        let exported = refrain(&mesh, &["store", "export", "--tenant", "acme"])
            .await
            .ok()?;
        let outputs = exported.matches("output_token_ids").count();
        let is_there = outputs == 2 && exported.contains(SESSION);
        let is_there = is_there && requests(&mesh, "acme").await.ok()? == 2;
        is_there.then_some(())
    })
    .await;
    // Repeats are drafted from what was said. As a rule, the erasure comes before the upload of this one.
    let remembered = acme.chat(&chat).await?.accepted();
    ensure!(remembered > 10, "{remembered}");
    ensure!(!files_with(mesh.dir(), &[SESSION])?.is_empty());
    wait_until("the engine has written its blocks", async || {
        let are_there = blocks.iter().all(|block| has_block(&mesh, block));
        are_there.then_some(())
    })
    .await;

    let words = [
        "store",
        "erase",
        "--tenant",
        "acme",
        "--everything",
        "--scheduler",
        &mesh.url(Service::Scheduler),
        "--json",
    ];
    let proof = refrain(&mesh, &words).await?;
    let proof: Value = proof
        .lines()
        .find_map(|line| serde_json::from_str(line).ok())
        .context(proof)?;
    let number = |pointer: &str| proof.pointer(pointer).and_then(Value::as_u64);
    ensure!(
        number("/documents") >= Some(2) && number("/documents_left") == Some(0),
        "{proof}"
    );
    ensure!(number("/usage/0/gateways") == Some(1), "{proof}");
    ensure!(number("/usage/0/rows") >= Some(1), "{proof}");
    ensure!(
        number("/engines/workers/0/file_blocks") >= Some(1),
        "{proof}"
    );
    ensure!(number("/engines/workers/0/running") == Some(0), "{proof}");
    ensure!(!has_block(&mesh, &blocks[0]) && has_block(&mesh, &blocks[1]));
    let exported = refrain(&mesh, &["store", "export", "--tenant", "acme"]).await?;
    ensure!(!exported.contains("output_token_ids"), "{exported}");
    ensure!(requests(&mesh, "acme").await? == 0 && requests(&mesh, "bolt").await? == 2);
    ensure!(!is_readable(&acme, &responses[0]).await? && is_readable(&bolt, &responses[1]).await?);
    // The worker forgets what the store forgot. Then an output is drafted from its own beginning at most.
    wait_until("the worker has forgotten", async || {
        let scrape = mesh.scrape(Service::Worker(0)).await.ok()?;
        (scrape.sum("refrain_replica_documents", &[]) == 2.0).then_some(())
    })
    .await;
    let forgotten = acme.chat(&chat).await?.accepted();
    ensure!(forgotten < remembered / 2, "{forgotten} of {remembered}");
    let left = files_with(mesh.dir(), &[SESSION, GROUP])?;
    ensure!(left.is_empty(), "{left:?}");
    mesh.stop().await
}
