//! Tables: wrapped to a terminal, aligned columns that `awk` can read elsewhere.

use comfy_table::{CellAlignment, ContentArrangement, TableComponent, presets};

/// Where the text of a column stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// Rows of text under titles.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns and no rows.
    pub(crate) fn new<S: Into<String>>(columns: impl IntoIterator<Item = (S, Align)>) -> Table {
        let columns = columns.into_iter().map(|(title, align)| (title.into(), align)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row. Missing cells are empty, further ones are dropped.
    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    /// Whether there is a line of titles; a list of names and values has none.
    fn has_titles(&self) -> bool {
        self.columns.iter().any(|(title, _)| !title.is_empty())
    }

    /// For a terminal of this width.
    pub(crate) fn wrapped(&self, width: u16) -> String {
        let mut table = comfy_table::Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_style(TableComponent::HeaderLines, '─')
            .set_style(TableComponent::MiddleHeaderIntersections, '─')
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(width)
            .add_rows(&self.rows);
        if self.has_titles() {
            table.set_header(self.columns.iter().map(|(title, _)| title));
        }
        for (column, (_, align)) in table.column_iter_mut().zip(&self.columns) {
            column.set_cell_alignment(match align {
                Align::Left => CellAlignment::Left,
                Align::Right => CellAlignment::Right,
            });
        }
        // Cells are padded, which would leave white space at the ends of lines.
        table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// For a pipe or a file: one line per row, two spaces between columns, none at the end of a line.
    pub(crate) fn plain(&self) -> String {
        let titles: Vec<String> = self.columns.iter().map(|(title, _)| title.clone()).collect();
        let lines = || std::iter::once(&titles).filter(|_| self.has_titles()).chain(&self.rows);
        let width = |column: usize| lines().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = String::new();
        for row in lines() {
            let cells = row.iter().zip(&widths).zip(&self.columns);
            let cells: Vec<String> = cells
                .map(|((cell, &width), (_, align))| match align {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                })
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Table {
        let mut table = Table::new([("name", Align::Left), ("steps", Align::Right), ("note", Align::Left)]);
        table.row(["bsp", "1200", "every worker waits"]);
        table.row(["asp", "9"]);
        table
    }

    #[test]
    fn plain_columns_are_aligned_and_lines_end_cleanly() {
        let expected = "name  steps  note\nbsp    1200  every worker waits\nasp       9\n";
        assert_eq!(example().plain(), expected);
    }

    #[test]
    fn a_wrapped_table_fits_its_terminal() {
        let text = example().wrapped(24);
        assert!(text.lines().all(|line| line.chars().count() <= 24), "{text}");
        assert!(text.contains("every"), "{text}");
    }
}
