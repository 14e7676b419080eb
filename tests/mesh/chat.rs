//! `refrain chat`, with questions from a pipe.

use std::process::Stdio;

use anyhow::{Context, ensure};
use e2e::{Program, refrain_binary};
use tokio::io::AsyncWriteExt;

/// The output of a conversation.
struct Said {
    is_success: bool,
    /// The lines of all answers.
    answers: Vec<String>,
    notes: String,
}

/// Sends lines to `refrain chat`.
async fn chat(arguments: &[&str], lines: &str) -> anyhow::Result<Said> {
    let mut child = tokio::process::Command::new(refrain_binary()?)
        .arg("chat")
        .args(arguments)
        .env_remove("REFRAIN_API_KEY")
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut input = child.stdin.take().context("no input")?;
    // A program that ends at once may not read its input.
    let _ = input.write_all(lines.as_bytes()).await;
    drop(input);
    let output = child.wait_with_output().await?;
    Ok(Said {
        is_success: output.status.success(),
        answers: String::from_utf8(output.stdout)?
            .lines()
            .map(str::to_owned)
            .collect(),
        notes: String::from_utf8(output.stderr)?,
    })
}

/// The steps of each answer, out of the lines about them.
fn steps(notes: &str) -> Vec<u32> {
    let told = notes.lines().filter_map(|line| {
        let (_, rest) = line.split_once(" in ")?;
        rest.split(" engine step").next()?.parse().ok()
    });
    told.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_was_given_before_takes_fewer_steps() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (_program, url) = Program::up(dir.path(), &[], &[]).await?;
    let question = "CREATE TABLE orders ( id INTEGER, city TEXT ); List the cities of all orders.";
    let lines = format!("/system You write SQL.\n{question}\n\n/new\n{question}\n");
    let said = chat(&["--url", &url, "--max-tokens", "48"], &lines).await?;
    ensure!(said.is_success, "{}", said.notes);
    // An answer may have several lines.
    let (first, second) = said.answers.split_at(said.answers.len() / 2);
    ensure!(first == second && !first.is_empty(), "{:?}", said.answers);
    let steps = steps(&said.notes);
    ensure!(
        steps.len() == 2 && steps[1] < steps[0],
        "steps: {steps:?} in\n{}",
        said.notes
    );
    ensure!(
        said.notes.contains(" from earlier outputs"),
        "{}",
        said.notes
    );
    let all = said.answers.concat() + &said.notes;
    ensure!(!all.contains('\x1b') && !all.contains("> "), "{all}");

    // Without drafts every token has a step of its own.
    let plain = ["--url", &url, "--max-tokens", "4", "--speculation", "off"];
    let said = chat(&plain, question).await?;
    ensure!(
        said.notes
            .starts_with("4 tokens in 4 engine steps, 0 saved"),
        "{}",
        said.notes
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_one_line_and_the_next_question_is_answered() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (_program, url) = Program::up(dir.path(), &[], &[]).await?;
    // The prompt is longer than the context.
    let lines = format!("{}\n/frobnicate\nHello\n", "long ".repeat(5_000));
    let said = chat(&["--url", &url, "--max-tokens", "4"], &lines).await?;
    let notes: Vec<&str> = said.notes.lines().collect();
    let [refused, unknown, told, status] = notes[..] else {
        anyhow::bail!("{notes:?}");
    };
    ensure!(refused.contains("context"), "{refused}");
    ensure!(
        unknown == "There is no command /frobnicate; /help lists them.",
        "{unknown}"
    );
    ensure!(told.contains("4 tokens in "), "{told}");
    ensure!(!said.is_success && status.contains("without an answer: 1"));

    let keyless = ["--url", &url, "--api-key", "sk-wrong"];
    let said = chat(&keyless, "Hello\n").await?;
    ensure!(!said.is_success && said.notes.lines().count() == 1);
    ensure!(said.notes.contains("key"), "{}", said.notes);
    Ok(())
}

#[tokio::test]
async fn where_nothing_listens_it_says_what_starts_a_mesh() -> anyhow::Result<()> {
    let said = chat(&["--url", "http://127.0.0.1:1/v1"], "Hello\n").await?;
    ensure!(!said.is_success && said.answers.is_empty());
    let line = "Error: nothing answers at http://127.0.0.1:1; `refrain up` starts a mesh\n";
    ensure!(said.notes == line, "{}", said.notes);
    Ok(())
}
