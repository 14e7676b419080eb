//! The report of an experiment, for people and for programs.

use serde::Serialize;

use super::options::PaperOptions;
use crate::text_table::text_table;

/// The report of an experiment.
#[derive(Clone, Debug, Serialize)]
pub struct PaperReport {
    /// The experiment.
    pub name: &'static str,
    /// Its subject.
    pub title: &'static str,
    /// The paper.
    pub paper: &'static str,
    /// Its version.
    pub version: &'static str,
    /// Where the experiment stands in it.
    pub place: &'static str,
    /// The paper's words about it.
    pub claim: &'static str,
    /// The calls that were used.
    pub data: String,
    /// Table and note.
    #[serde(flatten)]
    pub(super) findings: Findings,
    /// The options.
    pub settings: PaperOptions,
}

/// The findings of an experiment.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Findings {
    /// The head above the names of the rows.
    pub(super) rows_are: &'static str,
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Row>,
    /// How the experiment differs from the paper's.
    pub(super) note: String,
    /// The names of the picture's axes.
    #[serde(skip)]
    pub(super) axes: (&'static str, &'static str),
}

impl Findings {
    pub(super) fn new(
        rows_are: &'static str,
        columns: &[Column],
        rows: impl IntoIterator<Item = Row>,
        axes: (&'static str, &'static str),
        note: impl Into<String>,
    ) -> Self {
        Findings {
            rows_are,
            columns: columns.to_vec(),
            rows: rows.into_iter().collect(),
            note: note.into(),
            axes,
        }
    }
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// Whether its figures are the paper's.
    pub is_published: bool,
    /// Whether the picture shows it.
    #[serde(skip)]
    pub(super) is_drawn: bool,
    #[serde(skip)]
    pub(super) digits: usize,
}

/// A row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Rows of one kind are one curve of the picture.
    pub kind: Option<String>,
    /// Its place on the axis of the picture; `null` where rows are names.
    pub at: Option<f64>,
    /// A cell for each column; `null` where there is no figure.
    pub cells: Vec<Option<Cell>>,
}

/// A figure: its mean over the seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The mean.
    pub mean: f64,
    /// The smallest and the largest value; `null` where they are equal.
    pub range: Option<[f64; 2]>,
}

impl Column {
    /// A measured column.
    pub(super) const fn measured(name: &'static str, digits: usize) -> Self {
        Column {
            name,
            is_published: false,
            is_drawn: false,
            digits,
        }
    }

    /// A column of the paper.
    pub(super) const fn published(name: &'static str, digits: usize) -> Self {
        Column {
            is_published: true,
            ..Column::measured(name, digits)
        }
    }

    /// The same column, which the picture shows.
    pub(super) const fn drawn(self) -> Self {
        Column {
            is_drawn: true,
            ..self
        }
    }
}

impl Row {
    /// A row without a place in the picture but its name.
    pub(super) fn new(name: impl Into<String>, cells: Vec<Option<Cell>>) -> Self {
        Row {
            name: name.into(),
            kind: None,
            at: None,
            cells,
        }
    }

    /// The same row at this place of the axis.
    pub(super) fn at(self, at: f64) -> Self {
        Row {
            at: Some(at),
            ..self
        }
    }

    /// The same row, of this kind.
    pub(super) fn of(self, kind: impl Into<String>) -> Self {
        Row {
            kind: Some(kind.into()),
            ..self
        }
    }
}

impl Cell {
    /// A figure without a range.
    pub(super) fn exact(value: f64) -> Option<Self> {
        Some(Cell {
            mean: value,
            range: None,
        })
    }

    /// The mean of the figures of all seeds; `None` where no seed has one.
    pub(super) fn over(values: impl IntoIterator<Item = Option<f64>>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().flatten().collect();
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (!values.is_empty()).then(|| Cell {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            range: (least < most).then_some([least, most]),
        })
    }

    fn text(self, digits: usize) -> String {
        let Cell { mean, range } = self;
        match range {
            Some([least, most]) => format!("{mean:.digits$} ({least:.digits$} to {most:.digits$})"),
            None => format!("{mean:.digits$}"),
        }
    }
}

impl PaperReport {
    /// The report as text for people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{}\n{}, {}, {}\nThe paper: {}\nCalls: {}\n\n",
            self.title, self.paper, self.version, self.place, self.claim, self.data
        );
        let lines = self.lines();
        text += &text_table(1, &[], lines);
        text + "\n" + &self.findings.note + "\n"
    }

    /// The cells of the table, the head first.
    pub(super) fn lines(&self) -> Vec<Vec<String>> {
        let Findings { columns, rows, .. } = &self.findings;
        let head = columns.iter().map(|column| match column.is_published {
            true => format!("paper: {}", column.name),
            false => column.name.to_owned(),
        });
        let mut lines = vec![
            std::iter::once(self.findings.rows_are.to_owned())
                .chain(head)
                .collect(),
        ];
        for row in rows {
            let cells = row.cells.iter().zip(columns).map(|(cell, column)| {
                cell.map_or_else(|| "-".to_owned(), |cell| cell.text(column.digits))
            });
            lines.push(std::iter::once(row.name.clone()).chain(cells).collect());
        }
        lines
    }
}
