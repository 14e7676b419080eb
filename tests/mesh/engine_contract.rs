//! The contract between the worker's adapter and the reference engine, over HTTP.

use anyhow::{Context, ensure};
use e2e::{HttpMesh, PATIENCE, Service};
use refrain_protocol::engine::{
    CloseRequest, DetokenizeResponse, Draft, EngineLoad, SelfDraft, SessionSpec, StepItem,
    StepRequest, TokenizeRequest, TokensBody,
};
use refrain_protocol::{EngineSessionId, ErrorKind, NamespaceId, TokenId};
use refrain_service_kit::http::MeshClient;
use refrain_worker::{HttpEngine, VerifyingEngine};

fn item(session: u128, open: bool, keep_len: u32, tokens: &[TokenId]) -> StepItem {
    StepItem {
        self_draft: None,
        session: EngineSessionId(session),
        open: open.then(|| SessionSpec {
            namespace: NamespaceId(1),
            ..SessionSpec::default()
        }),
        keep_len,
        tokens: tokens.to_vec(),
        sample: true,
        draft: None,
        max_emit: 1,
    }
}

async fn tokenize(client: &MeshClient, text: &str) -> anyhow::Result<Vec<u32>> {
    let request = TokenizeRequest { text: text.into() };
    let body: TokensBody = client
        .post_json("/engine/v1/tokenize", &request, None)
        .await?;
    Ok(body.tokens)
}

async fn detokenize(client: &MeshClient, tokens: Vec<u32>) -> anyhow::Result<String> {
    let request = TokensBody { tokens };
    let body: DetokenizeResponse = client
        .post_json("/engine/v1/detokenize", &request, None)
        .await?;
    Ok(body.text)
}

async fn load(client: &MeshClient) -> anyhow::Result<EngineLoad> {
    Ok(client.get_json("/engine/v1/load").await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_adapter_and_the_engine_agree() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_here(1, "").await?;
    let url = mesh.url(Service::Engine(0));
    let client = MeshClient::new(&url, &mesh.keys().secret, PATIENCE)?;
    let engine = HttpEngine::connect(client.clone()).await?;
    engine.confirm().await?;

    let text = "SELECT name FROM orders;";
    let prompt = tokenize(&client, text).await?;
    ensure!(
        detokenize(&client, prompt.clone()).await? == text,
        "text did not come back"
    );

    // Four tokens one by one, and then the same four as a draft: one step gives the same tokens.
    let mut said = Vec::new();
    let mut step = item(1, true, 0, &prompt);
    for _ in 0..4 {
        let response = engine.step(StepRequest { items: vec![step] }).await?;
        let output = response.results.into_iter().next().context("no result")??;
        said.extend(output.emitted);
        step = item(1, false, output.text_len, &[]);
    }
    ensure!(
        load(&client).await?.sessions_open == 1,
        "one session is open"
    );
    let mut drafted = item(2, true, 0, &prompt);
    drafted.draft = Some(Draft {
        tokens: said[..3].to_vec(),
        parents: vec![None, Some(0), Some(1)],
    });
    drafted.max_emit = 4;
    let response = engine
        .step(StepRequest {
            items: vec![drafted],
        })
        .await?;
    let output = response.results.into_iter().next().context("no result")??;
    ensure!(
        output.emitted == said,
        "{:?} is not {said:?}",
        output.emitted
    );
    ensure!(
        output.accepted_nodes == [0, 1, 2],
        "{:?}",
        output.accepted_nodes
    );
    ensure!(output.cached_tokens > 0, "the prompt's KV was not reused");

    // A session can always be truncated: after two tokens less, the same two tokens follow.
    let back = item(2, false, output.text_len - 2, &[]);
    let response = engine.step(StepRequest { items: vec![back] }).await?;
    let output = response.results.into_iter().next().context("no result")??;
    ensure!(output.emitted == said[2..3], "{:?}", output.emitted);

    let both = [EngineSessionId(1), EngineSessionId(2)];
    engine
        .close(CloseRequest {
            sessions: both[..1].to_vec(),
            keep_kv: true,
            parks: false,
        })
        .await?;
    engine.abort(both[1..].to_vec()).await?;
    let load = load(&client).await?;
    ensure!(
        (load.sessions_open, load.sessions_kept) == (0, 1),
        "{load:?}"
    );
    let gone = StepRequest {
        items: vec![item(2, false, 1, &[])],
    };
    let refused = engine
        .step(gone)
        .await?
        .results
        .into_iter()
        .next()
        .context("no result")?;
    ensure!(
        refused.is_err_and(|error| error.kind == ErrorKind::NotFound),
        "an aborted session lives"
    );
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_drafts_by_itself() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_here(1, "").await?;
    let url = mesh.url(Service::Engine(0));
    let client = MeshClient::new(&url, &mesh.keys().secret, PATIENCE)?;
    let engine = HttpEngine::connect(client.clone()).await?;
    let prompt = tokenize(&client, "SELECT name FROM orders WHERE").await?;
    let wanted = SelfDraft {
        depth: 4,
        top_k: 2,
        tokens_max: 8,
        path_prob_min: 0.01,
        sampled: false,
    };
    let mut said = [Vec::new(), Vec::new()];
    let (mut steps, mut drafted, mut draft_s) = (0, 0, 0.0);
    for (session, said) in [1, 2].into_iter().zip(&mut said) {
        let drafts = session == 2;
        let mut step = item(session, true, 0, &prompt);
        if let Some(spec) = &mut step.open {
            spec.self_drafts = drafts;
        }
        while said.len() < 24 {
            let response = engine.step(StepRequest { items: vec![step] }).await?;
            let output = response.results.into_iter().next().context("no result")??;
            if drafts {
                steps += 1;
                drafted += output.self_drafted;
                draft_s += response.draft_s;
            }
            said.extend(output.emitted);
            step = item(session, false, output.text_len, &[]);
            step.self_draft = drafts.then_some(wanted);
            step.max_emit = (24 - said.len()).max(1) as u32;
        }
    }
    ensure!(said[0] == said[1], "{:?} is not {:?}", said[1], said[0]);
    ensure!(
        steps < 24 && drafted > 0,
        "{steps} steps, {drafted} drafted"
    );
    ensure!(draft_s > 0.0, "drafting took no time");

    // A session that was not opened for drafts gets an error, and goes on.
    let mut step = item(1, false, 1, &[]);
    step.self_draft = Some(wanted);
    let response = engine.step(StepRequest { items: vec![step] }).await?;
    let refused = response.results.into_iter().next().context("no result")?;
    ensure!(
        refused.is_err_and(|error| error.param.as_deref() == Some("items[0].self_draft")),
        "a draft was made for a session without"
    );
    mesh.stop().await
}
