//! Logs that tools wrote, in `tests/logs`: all that is read of them is in `tests/logs/expected`.

use std::fmt::Write;

use super::super::call::Content;
use super::*;

fn text_of(content: &Content) -> String {
    match content {
        Content::Tokens(tokens) => format!("{tokens:?}\n"),
        Content::Text(pieces) => format!("{}\n", pieces.concat()),
    }
}

/// The calls and the summary, for people to check.
fn told(name: &str) -> anyhow::Result<String> {
    let folder = samples().join(name);
    let (calls, summary) = read(std::slice::from_ref(&folder))?;
    let mut text = String::new();
    for sentence in summary.sentences() {
        writeln!(text, "{sentence}")?;
    }
    for call in calls {
        let head = &call.head;
        text.push_str("\n=== call");
        let names = [
            ("session", &head.session),
            ("tenant", &head.tenant),
            ("workload", &head.workload),
            ("group", &head.group),
            ("model", &head.model),
        ];
        for (name, value) in names {
            if let Some(value) = value {
                write!(text, ", {name} {value:?}")?;
            }
        }
        let times = [
            ("at_ms", head.at_ms),
            ("duration_ms", head.duration_ms),
            ("first_ms", head.first_ms),
        ];
        for (name, value) in times {
            if let Some(value) = value {
                write!(text, ", {name} {value}")?;
            }
        }
        write!(
            text,
            "\n{}--- output\n{}",
            text_of(&call.prompt),
            text_of(&call.output)
        )?;
    }
    let folder = folder.display().to_string();
    Ok(text.replace(&folder, name))
}

#[test]
fn samples_are_read_as_expected() -> anyhow::Result<()> {
    let mut names: Vec<String> = std::fs::read_dir(samples())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<anyhow::Result<_>>()?;
    names.retain(|name| !["expected", "make"].contains(&name.as_str()) && !name.ends_with(".md"));
    names.sort();
    assert!(names.len() >= 25, "{names:?}");
    for name in names {
        let told = told(&name).unwrap_or_else(|error| format!("{error:#}\n"));
        let expected = samples().join("expected").join(format!("{name}.txt"));
        expect_test::expect_file![expected].assert_eq(&told);
    }
    Ok(())
}
