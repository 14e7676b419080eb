//! Reports for people and for programs. Tables have columns as wide as their content, without lines.

use comfy_table::{CellAlignment, Table, presets};
use refrain_protocol::names::{is_invisible, shown};
use serde::Serialize;

/// Prints a report as one JSON object, or as text for people.
pub(crate) fn print_report<R: Serialize>(
    report: &R,
    as_json: bool,
    text: impl FnOnce(&R) -> String,
) -> serde_json::Result<()> {
    if as_json {
        println!("{}", serde_json::to_string_pretty(report)?);
    } else {
        print!("{}", text(report));
    }
    Ok(())
}

/// A table of these rows below a head, which may be empty. The first `labels` columns are aligned to the left, all
/// others, which hold numbers, to the right. A cell may have several lines. Other characters that a terminal would
/// not show come as escapes.
pub fn text_table(
    labels: usize,
    head: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    if !head.is_empty() {
        table.add_row(head);
    }
    let plain = |cell: String| match cell.contains(is_invisible) {
        true => cell.split('\n').map(shown).collect::<Vec<_>>().join("\n"),
        false => cell,
    };
    table.add_rows(rows.into_iter().map(|row| row.into_iter().map(plain)));
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if number >= labels {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt() + "\n"
}

/// A number with this many digits after the point, or `-` if there is none.
pub fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_on_the_left_and_numbers_on_the_right() {
        let rows = [("a", Some(2.0)), ("longer", None)];
        let table = text_table(
            1,
            &["name", "rate\nper s"],
            rows.map(|(name, value)| vec![name.to_owned(), number(value, 1)]),
        );
        assert_eq!(
            table,
            "name     rate\n        per s\na         2.0\nlonger      -\n"
        );
        assert_eq!(text_table(1, &[], [vec!["a".to_owned()]]), "a\n");
        assert_eq!(
            text_table(1, &[], [vec!["a\u{1b}[1m".to_owned()]]),
            "a\\u{1b}[1m\n"
        );
    }
}
