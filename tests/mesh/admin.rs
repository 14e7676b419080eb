//! Tenants and keys that operators manage over HTTP, through losses of the gateway and the draft store.

use std::path::Path;

use anyhow::{Context as _, ensure};
use e2e::{Chat, Client, HttpMesh, Program, Service, free_addr, wait_until};
use refrain_accounts::OperatorToken;

/// The operator's command against a gateway.
struct Operator<'a> {
    dir: &'a Path,
    url: String,
    token: String,
}

impl Operator<'_> {
    /// Runs the command with these words, and returns what it prints.
    async fn run(&self, words: &[&str]) -> anyhow::Result<String> {
        let arguments = [words, &["--url", &self.url]].concat();
        let variables = [("REFRAIN_OPERATOR_TOKEN", &*self.token)];
        let mut program = Program::start(self.dir, &arguments, &variables)?;
        let status = program.ended().await?;
        ensure!(status.success(), "{words:?}: {}", program.output());
        Ok(program.output())
    }
}

async fn status(client: &Client) -> Option<u16> {
    let chat = Chat::new("a").max_tokens(1);
    let request = client.request(reqwest::Method::POST, "/v1/chat/completions");
    let answer = request.json(chat.body()).send().await.ok()?;
    Some(answer.status().as_u16())
}

/// Waits until a key gets this status.
async fn until(client: &Client, wanted: u16) {
    wait_until(&format!("the key gets {wanted}"), async || {
        (status(client).await? == wanted).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_made_over_the_api_survive_the_loss_of_gateway_and_store() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let made = OperatorToken::random()?;
    let operations = free_addr()?;
    let settings = format!(
        "[gateway]\n\
         operations_listen = \"{operations}\"\n\
         tenants_in_store = true\n\
         audit_file = \"{0}/audit.jsonl\"\n\
         tenants_cache_file = \"{0}/tenants.json\"\n\
         operators = [{{ name = \"ann\", token_sha256 = \"{1}\" }}]\n",
        dir.path().display(),
        made.sha256,
    );
    let mut mesh = HttpMesh::start_children(1, &settings, &[]).await?;
    let operator = Operator {
        dir: dir.path(),
        url: format!("http://{operations}"),
        token: made.token,
    };
    operator
        .run(&["tenants", "add", "acme", "--requests-per-minute", "6000"])
        .await?;
    let add = ["keys", "add", "acme", "--name"];
    let key = operator.run(&[&add[..], &["ci"]].concat()).await?;
    let key = Client::new(&mesh.url(Service::Gateway), key.trim());
    until(&key, 200).await;
    operator
        .run(&["tenants", "set", "acme", "--tokens-per-minute", "60000"])
        .await?;
    let table = operator.run(&["tenants", "list"]).await?;
    ensure!(table.contains("6000") && table.contains("60000"), "{table}");

    // Without the store the gateway goes on, and starts, with what it knows.
    mesh.kill(Service::DraftStore).await?;
    ensure!(status(&key).await == Some(200));
    let refused = operator.run(&["tenants", "list"]).await;
    ensure!(refused.is_err(), "a store that is away told its tenants");
    mesh.kill(Service::Gateway).await?;
    mesh.start_child(Service::Gateway).await?;
    until(&key, 200).await;

    // Both come back with everything that was acknowledged.
    mesh.start_child(Service::DraftStore).await?;
    mesh.ready().await;
    wait_until("the store tells its tenants", async || {
        let listed = operator.run(&["keys", "list"]).await.ok()?;
        listed.contains(" ci ").then_some(())
    })
    .await;
    ensure!(status(&key).await == Some(200));
    let second = operator.run(&[&add[..], &["cd"]].concat()).await?;
    let second = Client::new(&mesh.url(Service::Gateway), second.trim());
    until(&second, 200).await;
    let listed = operator.run(&["keys", "list"]).await?;
    let row = listed.lines().find(|line| line.contains(" ci "));
    let id = row.and_then(|row| row.split_whitespace().next());
    let id = id.with_context(|| format!("no key ci in {listed}"))?;
    operator.run(&["keys", "revoke", id]).await?;
    until(&key, 401).await;
    ensure!(status(&second).await == Some(200));

    let audit = std::fs::read_to_string(dir.path().join("audit.jsonl"))?;
    let done = audit
        .lines()
        .filter(|line| line.contains("\"outcome\":\"done\""));
    ensure!(done.count() == 5, "{audit}");
    mesh.stop().await
}
