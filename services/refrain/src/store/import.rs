//! Imports a trace file: reads lines, gathers them into batches, and keeps a few batches in flight.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use refrain_lab::json_lines::{JsonLines, ReadProgress, line_error};
use refrain_lab::progress::ProgressLine;
use refrain_protocol::admin::ImportRequest;
use refrain_protocol::document::{DocumentHead, DocumentUpdate, LEFT_CONTEXT_TOKENS};
use refrain_protocol::history::PromptHash;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, Namespace, TokenId};
use refrain_service_kit::clock;
use refrain_tokenization::Tokenizer;
use serde::Deserialize;
use tokio::task::JoinHandle;
use xxhash_rust::xxh3::Xxh3;

use super::finish_names::finish_of;
use super::target::{Access, Target, TargetArgs};

/// Limits of a batch: enough for one commit, and far below the largest body.
const BATCH_DOCUMENTS: usize = 512;
const BATCH_TOKENS: usize = 512 << 10;
/// Batches in flight: one is committed while the next travels.
const BATCHES_MAX: usize = 4;
/// Attempts to send a batch to a store that is busy, and to one whose disk refuses.
const BUSY_TRIES_MAX: u32 = 100;
const REFUSED_TRIES_MAX: u32 = 5;
/// The tokenizer of token ids whose tokenizer the trace does not name. No model has it, so nothing drafts from them
/// until they are exported and imported again under a name.
const UNKNOWN_TOKENIZER: &str = "unknown";

/// Arguments of `refrain store import`.
#[derive(Args, Clone, Default)]
pub(super) struct ImportArgs {
    #[command(flatten)]
    pub(super) target: TargetArgs,
    /// Trace file; `-` is standard input.
    #[arg(value_name = "TRACE")]
    pub(super) trace: PathBuf,
    /// Tenant of the outputs [default: each line's `tenant`].
    #[arg(long)]
    pub(super) tenant: Option<String>,
    /// Public name of the model [default: each line's `model`].
    #[arg(long)]
    pub(super) model: Option<String>,
    /// The model's tokenizer, which identifies the outputs and turns text into tokens.
    #[arg(long, value_name = "TOKENIZER.JSON")]
    pub(super) tokenizer: Option<PathBuf>,
    /// The tokenizer's identity, if the file is not at hand [default: each line's `tokenizer`, else `unknown`].
    #[arg(long, conflicts_with = "tokenizer")]
    pub(super) tokenizer_id: Option<String>,
    /// Store the outputs for good: no budget and no age removes them, only `erase`.
    #[arg(long = "static")]
    pub(super) is_static: bool,
    /// Print one JSON object per acknowledged batch: {"acknowledged": N}, where the first N outputs are stored.
    #[arg(long)]
    pub(super) json: bool,
}

/// One line of a trace file. An export also writes `document` and the fields after it.
#[derive(Deserialize)]
struct TraceLine {
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
    prompt_hash: Option<String>,
    #[serde(default)]
    choice: u32,
    #[serde(default)]
    weight_version: u64,
    created_ms: Option<u64>,
    finish: Option<String>,
}

/// Counts of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Imported {
    pub(super) documents: u64,
    /// Lines without output, which are skipped.
    pub(super) empty: u64,
}

/// Turns lines into documents.
struct LineParser {
    tenant: Option<String>,
    model: Option<String>,
    tokenizer_id: Option<String>,
    tokenizer: Option<Tokenizer>,
    /// Whether the warning about an unnamed tokenizer was printed.
    warned_of_unknown: bool,
    /// How often each content occurred. Equal outputs are different documents, and importing a file twice changes
    /// nothing.
    seen: HashMap<u128, u32>,
    now_ms: u64,
}

impl LineParser {
    fn new(args: &ImportArgs) -> anyhow::Result<Self> {
        let tokenizer = args.tokenizer.as_deref().map(tokenizer).transpose()?;
        let identity = tokenizer.as_ref().map(|read| read.identity().to_owned());
        Ok(LineParser {
            tenant: args.tenant.clone(),
            model: args.model.clone(),
            tokenizer_id: identity.or_else(|| args.tokenizer_id.clone()),
            tokenizer,
            warned_of_unknown: false,
            seen: HashMap::new(),
            now_ms: clock::unix_ms(),
        })
    }

    /// Parses a line; `None` for one without output.
    fn parse(&mut self, line: &[u8]) -> anyhow::Result<Option<(Namespace, DocumentUpdate)>> {
        let line: TraceLine = serde_json::from_slice(line).map_err(line_error)?;
        let namespace = Namespace {
            tenant: chosen(&self.tenant, line.tenant, "tenant")?,
            model: chosen(&self.model, line.model, "model")?,
            tokenizer: self.tokenizer_of(line.tokenizer),
        };
        if let Some(fault) = namespace.fault() {
            bail!("{fault}");
        }
        let encode = |text: &str| -> anyhow::Result<Vec<TokenId>> {
            let tokenizer = self
                .tokenizer
                .as_ref()
                .context("the line holds text: name the tokenizer.json with --tokenizer")?;
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
        let prompt_hash = match (&line.prompt_hash, line.document) {
            (Some(hash), _) => Some(prompt_hash_of(hash)?),
            // An export has only the end of a prompt, so its hash would be that of another prompt.
            (None, Some(_)) => None,
            (None, None) => (!prompt.is_empty()).then(|| PromptHash::of(&prompt)),
        };
        let left_context = prompt[prompt.len().saturating_sub(LEFT_CONTEXT_TOKENS)..].to_vec();
        let head = DocumentHead {
            session: line.session,
            group: line.group,
            choice: line.choice,
            weight_version: line.weight_version,
            created_ms: line.created_ms.unwrap_or(self.now_ms),
            left_context,
            prompt_hash,
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
        if named.is_none() && !self.warned_of_unknown {
            self.warned_of_unknown = true;
            eprintln!(
                "the trace does not name the tokenizer of its ids: they are stored under {UNKNOWN_TOKENIZER:?}, from \
                 which no worker drafts; name it with --tokenizer or --tokenizer-id"
            );
        }
        named.unwrap_or_else(|| UNKNOWN_TOKENIZER.to_owned())
    }
}

fn prompt_hash_of(hex: &str) -> anyhow::Result<PromptHash> {
    let hash = u128::from_str_radix(hex, 16);
    let hash = hash.context("prompt_hash must be up to 32 hex digits")?;
    Ok(PromptHash(hash.max(1)))
}

fn tokenizer(path: &Path) -> anyhow::Result<Tokenizer> {
    let read = || anyhow::Ok(Tokenizer::from_bytes(&std::fs::read(path)?)?);
    read().with_context(|| format!("{}: not a tokenizer", path.display()))
}

fn chosen(argument: &Option<String>, line: Option<String>, what: &str) -> anyhow::Result<String> {
    match (argument, line) {
        (Some(name), _) => Ok(name.clone()),
        (None, Some(name)) => Ok(name),
        (None, None) => bail!("the line has no {what}: name it with --{what}"),
    }
}

/// The batches in flight, in order, and the count of acknowledged documents.
struct BatchSender<'a> {
    target: Arc<Target>,
    in_flight: VecDeque<(usize, JoinHandle<Result<(), ApiError>>)>,
    acknowledged: u64,
    json: bool,
    out: &'a mut dyn Write,
}

impl BatchSender<'_> {
    async fn send(&mut self, batch: ImportRequest) -> anyhow::Result<()> {
        if self.in_flight.len() >= BATCHES_MAX {
            self.acknowledge_first().await?;
        }
        let target = self.target.clone();
        let documents = batch.updates.len();
        let sending = tokio::spawn(async move { send_until_stored(&target, batch).await });
        self.in_flight.push_back((documents, sending));
        Ok(())
    }

    /// Waits for all batches, or for the first that fails.
    async fn acknowledge_all(&mut self) -> anyhow::Result<()> {
        while !self.in_flight.is_empty() {
            self.acknowledge_first().await?;
        }
        Ok(())
    }

    /// Waits for the oldest batch. Acknowledgements follow the order of the file, so the count is a prefix of it.
    /// After a refusal no later batch counts.
    async fn acknowledge_first(&mut self) -> anyhow::Result<()> {
        if let Some((documents, sending)) = self.in_flight.pop_front() {
            if let Err(error) = sending.await? {
                self.give_up().await;
                return Err(error.into());
            }
            self.acknowledged += documents as u64;
            if self.json {
                writeln!(self.out, "{{\"acknowledged\": {}}}", self.acknowledged)?;
                self.out.flush()?;
            }
        }
        Ok(())
    }

    /// Ends the batches in flight. Some of them may be stored, and are sent once more by the next import.
    async fn give_up(&mut self) {
        for (_, sending) in self.in_flight.drain(..) {
            sending.abort();
            let _ = sending.await;
        }
    }
}

/// Sends a batch until it is stored. A batch may be stored twice, which is harmless.
async fn send_until_stored(target: &Target, batch: ImportRequest) -> Result<(), ApiError> {
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

/// Gathers the lines of a trace into batches.
struct BatchReader {
    file: JsonLines,
    parser: LineParser,
    is_static: bool,
    gathered: Option<ImportRequest>,
    /// Lines without output.
    empty: u64,
}

impl BatchReader {
    /// The next batch, or `None` at the end of the file.
    fn next(&mut self) -> anyhow::Result<Option<ImportRequest>> {
        while self.file.advance()? {
            if self.file.line().is_empty() {
                continue;
            }
            let parsed = self.parser.parse(self.file.line());
            let Some((namespace, update)) = parsed.with_context(|| self.file.position())? else {
                self.empty += 1;
                continue;
            };
            let full = self.gathered.take_if(|batch| {
                let tokens: usize = batch.updates.iter().map(|of| of.tokens.len()).sum();
                batch.namespace != namespace
                    || batch.updates.len() >= BATCH_DOCUMENTS
                    || tokens + update.tokens.len() > BATCH_TOKENS
            });
            let gathering = self.gathered.get_or_insert_with(|| ImportRequest {
                namespace,
                updates: Vec::new(),
                is_static: self.is_static,
            });
            gathering.updates.push(update);
            if full.is_some() {
                return Ok(full);
            }
        }
        Ok(self.gathered.take())
    }
}

/// Runs `refrain store import`. With `--json`, acknowledgements are written to `out`.
pub(super) async fn run(args: &ImportArgs, out: &mut dyn Write) -> anyhow::Result<Imported> {
    let parser = LineParser::new(args)?;
    let trace = match args.trace.as_os_str() == "-" {
        true => PathBuf::from("/dev/stdin"),
        false => args.trace.clone(),
    };
    let metadata = std::fs::metadata(&trace)
        .with_context(|| format!("{}: the trace cannot be read", trace.display()))?;
    // The length of a pipe is unknown.
    let share_known = metadata.is_file();
    let progress = ReadProgress::new(metadata.len());
    let mut batches = BatchReader {
        file: JsonLines::open(trace, progress.clone())?,
        parser,
        is_static: args.is_static,
        gathered: None,
        empty: 0,
    };
    let target = Arc::new(Target::open(&args.target, Access::Write).await?);
    let bar = ProgressLine::default();
    let mut sender = BatchSender {
        target: target.clone(),
        in_flight: VecDeque::new(),
        acknowledged: 0,
        json: args.json,
        out,
    };
    let outcome = async {
        while let Some(batch) = batches.next()? {
            sender.send(batch).await?;
            let share = share_known.then(|| progress.share());
            bar.show(share, format!("{} documents", sender.acknowledged));
        }
        sender.acknowledge_all().await
    }
    .await;
    // Batches before a faulty line are stored as well. The first error is the one to report.
    let _ = sender.acknowledge_all().await;
    let done = Imported {
        documents: sender.acknowledged,
        empty: batches.empty,
    };
    drop((sender, bar));
    if let Some(target) = Arc::into_inner(target) {
        target.close().await;
    }
    let Imported { documents, empty } = done;
    eprintln!("{documents} documents imported, {empty} lines without output");
    if outcome.is_err() {
        eprintln!(
            "the first {documents} outputs of the trace are stored; the same command goes on where this one ended, and \
             stores nothing twice"
        );
    }
    outcome.map(|()| done)
}
