//! The options of `refrain paper`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;

use crate::logs::TokenizerOptions;

/// Most seeds of a command.
const SEEDS_MAX: u64 = 1_000;

/// The experiment, and the calls that it uses.
#[derive(Args, Clone, Debug, Serialize)]
pub struct PaperOptions {
    /// An experiment, or `list` for their names.
    #[arg(value_name = "list|NAME")]
    pub name: String,
    /// Files of recorded calls, as `refrain replay` reads them [default: calls that the seed generates].
    #[arg(value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Recorded calls that are known from the start and not measured.
    #[arg(long, value_name = "TRACE", requires = "traces")]
    pub warm: Vec<PathBuf>,
    /// How texts become tokens.
    #[command(flatten)]
    #[serde(flatten)]
    pub tokenizer: TokenizerOptions,
    /// Use at most this many calls of each trace, and of those that are generated or drawn.
    #[arg(long, value_name = "N")]
    pub docs: Option<usize>,
    /// Seeds of everything that is drawn. A report has means over the seeds, and ranges where they differ.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub seeds: u64,
    /// Also write a page with table and picture to this file.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub html: Option<PathBuf>,
    /// Also write the picture alone to this file.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub svg: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

impl PaperOptions {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (1..=SEEDS_MAX).contains(&self.seeds),
            "--seeds must be from 1 to {SEEDS_MAX}"
        );
        ensure!(self.docs != Some(0), "--docs must be at least 1");
        Ok(())
    }
}
