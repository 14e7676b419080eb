//! Packages ship completions for shells and pages for `man` beside the program. Both come from the command line
//! itself, so they name every command and option.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use clap_complete::Shell;

/// The version, and the commit that the program was built from.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_COMMIT"), ")");

/// The commit that the program was built from.
pub const COMMIT: &str = env!("BUILD_COMMIT");

/// Arguments of `refrain completions`.
#[derive(Args)]
pub struct CompletionsArgs {
    /// The shell that reads the completions.
    shell: Shell,
}

/// Arguments of `refrain man`.
#[derive(Args)]
pub struct ManArgs {
    /// Write a page for each command into this folder, which must exist, in place of one page to the output.
    #[arg(long)]
    folder: Option<PathBuf>,
}

/// Prints completions of a command line.
///
/// # Errors
/// The output cannot be written.
pub fn completions(args: &CompletionsArgs, mut command: clap::Command) -> anyhow::Result<()> {
    // The generator panics where it cannot write, as where the reader of a pipe ends.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "refrain", &mut text);
    Ok(io::stdout().write_all(&text)?)
}

/// Prints or writes pages for `man`.
///
/// # Errors
/// A page cannot be written.
pub fn man(args: &ManArgs, command: clap::Command) -> anyhow::Result<()> {
    match &args.folder {
        Some(folder) => clap_mangen::generate_to(command, folder)
            .with_context(|| format!("{}: the pages cannot be written", folder.display())),
        None => Ok(clap_mangen::Man::new(command).render(&mut io::stdout())?),
    }
}
