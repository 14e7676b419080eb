//! A trace file into the store: read, gathered to batches, a few of them under way at once.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use refrain_protocol::admin::ImportRequest;
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason, LEFT_CONTEXT_TOKENS};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, Namespace, TokenId};
use refrain_service_kit::clock;
use refrain_tokenization::Tokenizer;
use serde::Deserialize;
use tokio::task::JoinHandle;
use xxhash_rust::xxh3::Xxh3;

use super::ImportArgs;
use super::progress::Bar;
use super::target::{Access, Target};
use refrain_lab::json_lines::{JsonLines, ReadProgress, line_error};

/// A batch: one commit's worth, and far below the largest body.
const BATCH_DOCUMENTS: usize = 512;
const BATCH_TOKENS: usize = 512 << 10;
/// Batches under way at once: one is committed while the next travels.
const BATCHES_MAX: usize = 4;
/// How often a batch is sent again to a store that is busy, and to one whose disk refuses.
const BUSY_TRIES_MAX: u32 = 100;
const REFUSED_TRIES_MAX: u32 = 5;
/// The tokenizer of token ids of which nobody says what they stand for. No model has it, so nothing is drafted from
/// them before they are exported and imported under a name.
const UNKNOWN_TOKENIZER: &str = "unknown";

/// One line of a trace file. `document` and what follows it are written by an export.
#[derive(Deserialize)]
struct Line {
    tenant: Option<String>,
    model: Option<String>,
    tokenizer: Option<String>,
    session: Option<String>,
    turn: Option<u64>,
    group: Option<String>,
    prompt_token_ids: Option<Vec<TokenId>>,
    output_token_ids: Option<Vec<TokenId>>,
    prompt: Option<String>,
    output: Option<String>,
    document: Option<DocumentId>,
    #[serde(default)]
    choice: u32,
    #[serde(default)]
    weight_version: u64,
    created_ms: Option<u64>,
    finish: Option<String>,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Imported {
    pub(super) documents: u64,
    /// Lines without output: there is nothing to remember.
    pub(super) empty: u64,
}

/// Turns lines into documents.
struct Parser {
    tenant: Option<String>,
    model: Option<String>,
    tokenizer_id: Option<String>,
    tokenizer: Option<Tokenizer>,
    /// Whether a line came without any name of its tokenizer.
    is_unknown: bool,
    /// How often each content came: the same words said twice are two documents, and importing a file twice
    /// changes nothing.
    seen: HashMap<u128, u32>,
    now_ms: u64,
}

impl Parser {
    fn new(args: &ImportArgs) -> anyhow::Result<Self> {
        let tokenizer = args.tokenizer.as_deref().map(tokenizer).transpose()?;
        let identity = tokenizer.as_ref().map(|read| read.identity().to_owned());
        Ok(Parser {
            tenant: args.tenant.clone(),
            model: args.model.clone(),
            tokenizer_id: identity.or_else(|| args.tokenizer_id.clone()),
            tokenizer,
            is_unknown: false,
            seen: HashMap::new(),
            now_ms: clock::unix_ms(),
        })
    }

    /// `None` for a line without output.
    fn parse(&mut self, line: &[u8]) -> anyhow::Result<Option<(Namespace, DocumentUpdate)>> {
        let line: Line = serde_json::from_slice(line).map_err(line_error)?;
        let namespace = Namespace {
            tenant: chosen(&self.tenant, line.tenant, "tenant")?,
            model: chosen(&self.model, line.model, "model")?,
            tokenizer: self.tokenizer_of(line.tokenizer),
        };
        let encode = |text: &str| -> anyhow::Result<Vec<TokenId>> {
            let tokenizer = self.tokenizer.as_ref().context(
                "the line holds text: say with --tokenizer which tokenizer.json makes tokens of it",
            )?;
            Ok(tokenizer.encode(text)?)
        };
        let prompt = match (line.prompt_token_ids, &line.prompt) {
            (Some(ids), _) => ids,
            (None, Some(text)) => encode(text)?,
            (None, None) => Vec::new(),
        };
        let output = match (line.output_token_ids, &line.output) {
            (Some(ids), _) => ids,
            (None, Some(text)) => encode(text)?,
            (None, None) => bail!("the line has neither output_token_ids nor output"),
        };
        if output.is_empty() {
            return Ok(None);
        }
        let document = line.document.unwrap_or_else(|| {
            let mut hash = Xxh3::new();
            let names = format!("{:?}", (&line.session, line.turn, &line.group));
            hash.update(names.as_bytes());
            for token in prompt.iter().chain([&TokenId::MAX]).chain(&output) {
                hash.update(&token.to_le_bytes());
            }
            let count = self.seen.entry(hash.digest128()).or_default();
            *count += 1;
            hash.update(&count.to_le_bytes());
            DocumentId(hash.digest128())
        });
        let left_context = prompt[prompt.len().saturating_sub(LEFT_CONTEXT_TOKENS)..].to_vec();
        let head = DocumentHead {
            session: line.session,
            group: line.group,
            choice: line.choice,
            weight_version: line.weight_version,
            created_ms: line.created_ms.unwrap_or(self.now_ms),
            left_context,
        };
        let update = DocumentUpdate {
            document,
            epoch: 0,
            prev_len: 0,
            tokens: output,
            head,
            finish: finish_of(line.finish.as_deref())?,
        };
        Ok(Some((namespace, update)))
    }

    fn tokenizer_of(&mut self, line: Option<String>) -> String {
        let named = self.tokenizer_id.clone().or(line);
        if named.is_none() && !self.is_unknown {
            self.is_unknown = true;
            eprintln!(
                "the trace does not say which tokenizer its ids are of: they are stored under \
                 {UNKNOWN_TOKENIZER:?}, from which no worker drafts; --tokenizer or --tokenizer-id names it"
            );
        }
        named.unwrap_or_else(|| UNKNOWN_TOKENIZER.to_owned())
    }
}

fn tokenizer(path: &Path) -> anyhow::Result<Tokenizer> {
    let read = || anyhow::Ok(Tokenizer::from_bytes(&std::fs::read(path)?)?);
    read().with_context(|| format!("{}: no tokenizer", path.display()))
}

fn chosen(argument: &Option<String>, line: Option<String>, what: &str) -> anyhow::Result<String> {
    match (argument, line) {
        (Some(name), _) => Ok(name.clone()),
        (None, Some(name)) => Ok(name),
        (None, None) => bail!("the line has no {what}: say it with --{what}"),
    }
}

/// The reason in words; a line that says nothing is a whole output.
fn finish_of(name: Option<&str>) -> anyhow::Result<Option<FinishReason>> {
    Ok(match name {
        None | Some("stop") => Some(FinishReason::Stop),
        Some("length") => Some(FinishReason::Length),
        Some("cancelled") => Some(FinishReason::Cancelled),
        Some("failed") => Some(FinishReason::Failed),
        Some("running") => None,
        Some(other) => bail!("finish: {other} is none of stop, length, cancelled, failed, running"),
    })
}

/// The same the other way round.
pub(super) fn finish_name(finish: Option<FinishReason>) -> &'static str {
    match finish {
        Some(FinishReason::Stop) => "stop",
        Some(FinishReason::Length) => "length",
        Some(FinishReason::Cancelled) => "cancelled",
        Some(FinishReason::Failed) => "failed",
        None => "running",
    }
}

/// The batches under way, in order, and what became of those before them.
struct Sending<'a> {
    target: Arc<Target>,
    under_way: VecDeque<(usize, JoinHandle<Result<(), ApiError>>)>,
    acknowledged: u64,
    json: bool,
    out: &'a mut dyn Write,
}

impl Sending<'_> {
    async fn send(&mut self, batch: ImportRequest) -> anyhow::Result<()> {
        if self.under_way.len() >= BATCHES_MAX {
            self.acknowledge_first().await?;
        }
        let target = self.target.clone();
        let documents = batch.updates.len();
        let sending = tokio::spawn(async move { send(&target, batch).await });
        self.under_way.push_back((documents, sending));
        Ok(())
    }

    /// Acknowledgements are told in the order of the file: what is counted is its beginning.
    async fn acknowledge_first(&mut self) -> anyhow::Result<()> {
        if let Some((documents, sending)) = self.under_way.pop_front() {
            sending.await??;
            self.acknowledged += documents as u64;
            if self.json {
                writeln!(self.out, "{{\"acknowledged\": {}}}", self.acknowledged)?;
                self.out.flush()?;
            }
        }
        Ok(())
    }
}

/// Sends until it is stored. A batch may be stored twice by this, which is harmless.
async fn send(target: &Target, batch: ImportRequest) -> Result<(), ApiError> {
    let mut tries = 1;
    loop {
        match target.store().import(batch.clone()).await {
            Ok(_) => return Ok(()),
            Err(error)
                if tries
                    < match error.kind {
                        ErrorKind::Overloaded => BUSY_TRIES_MAX,
                        ErrorKind::Unavailable => REFUSED_TRIES_MAX,
                        _ => 0,
                    } =>
            {
                tries += 1;
                let wait_ms = error.retry_after_ms.unwrap_or(100).min(1_000);
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Imports a file. With `--json`, acknowledgements go to `out`.
pub(super) async fn run(args: &ImportArgs, out: &mut dyn Write) -> anyhow::Result<Imported> {
    let mut parser = Parser::new(args)?;
    let trace = match args.trace.as_os_str() == "-" {
        true => PathBuf::from("/dev/stdin"),
        false => args.trace.clone(),
    };
    let metadata = std::fs::metadata(&trace)
        .with_context(|| format!("{}: the trace cannot be read", trace.display()))?;
    // Of a pipe nobody knows how much is to come.
    let share_known = metadata.is_file();
    let progress = ReadProgress::new(metadata.len());
    let mut file = JsonLines::open(trace, progress.clone())?;
    let target = Arc::new(Target::open(&args.target, Access::Write).await?);
    let mut bar = Bar::new();
    let mut sending = Sending {
        target: target.clone(),
        under_way: VecDeque::new(),
        acknowledged: 0,
        json: args.json,
        out,
    };
    let mut done = Imported::default();
    let mut batch: Option<ImportRequest> = None;
    let mut tokens = 0;
    let outcome = async {
        while file.advance()? {
            if file.line().is_empty() {
                continue;
            }
            let parsed = parser.parse(file.line());
            let Some((namespace, update)) = parsed.with_context(|| file.position())? else {
                done.empty += 1;
                continue;
            };
            let is_full = batch.as_ref().is_some_and(|batch| {
                batch.namespace != namespace
                    || batch.updates.len() >= BATCH_DOCUMENTS
                    || tokens + update.tokens.len() > BATCH_TOKENS
            });
            if is_full && let Some(full) = batch.take() {
                sending.send(full).await?;
                bar.show(share_known.then(|| progress.share()), sending.acknowledged);
            }
            let gathering = batch.get_or_insert_with(|| {
                tokens = 0;
                ImportRequest {
                    namespace,
                    updates: Vec::new(),
                    is_static: args.is_static,
                }
            });
            tokens += update.tokens.len();
            gathering.updates.push(update);
        }
        if let Some(last) = batch.take() {
            sending.send(last).await?;
        }
        while !sending.under_way.is_empty() {
            sending.acknowledge_first().await?;
        }
        anyhow::Ok(())
    }
    .await;
    // What was sent before a line that is wrong is stored, too.
    while !sending.under_way.is_empty() {
        if sending.acknowledge_first().await.is_err() {
            break;
        }
    }
    done.documents = sending.acknowledged;
    drop((sending, bar));
    if let Some(target) = Arc::into_inner(target) {
        target.close().await;
    }
    eprintln!(
        "{} documents imported, {} lines without output",
        done.documents, done.empty
    );
    outcome.map(|()| done)
}
