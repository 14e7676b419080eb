//! Tables for people: columns as wide as their content, without lines.

use comfy_table::{CellAlignment, Table, presets};

/// A table of these rows. The first `labels` columns are aligned to the left, all others, which hold numbers, to the
/// right. A cell may have several lines.
pub fn text_table(labels: usize, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).add_rows(rows);
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
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let table = text_table(
            1,
            [
                row("name", "rate\nper s".into()),
                row("a", number(Some(2.0), 1)),
                row("longer", number(None, 1)),
            ],
        );
        assert_eq!(
            table,
            "name     rate\n        per s\na         2.0\nlonger      -\n"
        );
    }
}
