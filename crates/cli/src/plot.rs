//! Charts as SVG: lines over a numeric axis, or bars in named groups.

use anyhow::{Context, Result, anyhow, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

/// What to draw.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) body: Body,
}

/// How to draw it.
#[derive(Debug, Clone)]
pub(crate) enum Body {
    /// Points joined in their order.
    Lines(Vec<Line>),
    /// One bar for each series in each group; the values of a series follow the groups.
    Bars {
        /// Names along the axis.
        groups: Vec<String>,
        /// A name and a value for each group.
        series: Vec<(String, Vec<f64>)>,
    },
}

/// One line of a chart.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

const SIZE: (u32, u32) = (900, 540);
const FONT: &str = "sans-serif";
/// Told apart with any kind of colour vision, also in print.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];
/// Head-room above the highest value, where the legend finds place.
const HEAD_ROOM: f64 = 1.15;

/// Whether a chart can be written there; asked before the work that it is to show.
pub(crate) fn check(path: &Path) -> Result<()> {
    let is_svg = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg"));
    ensure!(is_svg, "{}: plots are SVG; expected a name that ends with .svg", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(
        folder.is_dir(),
        "cannot write the plot to {}: there is no folder {}",
        path.display(),
        folder.display()
    );
    Ok(())
}

impl Chart {
    /// Draws it into a file.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let svg = self.svg()?;
        std::fs::write(path, svg).with_context(|| format!("cannot write the plot to {}", path.display()))
    }

    /// Draws it.
    pub(crate) fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            area.fill(&WHITE).map_err(drawing)?;
            match &self.body {
                Body::Lines(lines) => self.draw_lines(&area, lines)?,
                Body::Bars { groups, series } => self.draw_bars(&area, groups, series)?,
            }
            area.present().map_err(drawing)?;
        }
        Ok(svg)
    }

    fn draw_lines(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, lines: &[Line]) -> Result<()> {
        let points = || lines.iter().flat_map(|line| finite(&line.points));
        let (left, right) = bounds(points().map(|(x, _)| x)).context("there is nothing to plot")?;
        let (low, high) = bounds(points().map(|(_, y)| y)).context("there is nothing to plot")?;
        // An axis that starts near zero starts at zero: the eye compares heights.
        let low = if low >= 0.0 && low < 0.5 * high { 0.0 } else { low };
        let mut chart = self
            .builder(area, 44)
            .build_cartesian_2d(left..beyond(left, right), low..low + (beyond(low, high) - low) * HEAD_ROOM)
            .map_err(drawing)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .bold_line_style(BLACK.mix(0.12))
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .label_style((FONT, 14))
            .axis_desc_style((FONT, 16))
            .x_label_formatter(&|x| number(*x))
            .y_label_formatter(&|y| number(*y))
            .draw()
            .map_err(drawing)?;
        for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
            chart
                .draw_series(LineSeries::new(finite(&line.points), colour.stroke_width(2)))
                .map_err(drawing)?
                .label(&line.name)
                .legend(|(x, y)| Rectangle::new([(x, y - 4), (x + 14, y + 4)], colour.filled()));
        }
        self.draw_legend(&mut chart)
    }

    fn draw_bars(
        &self,
        area: &DrawingArea<SVGBackend<'_>, Shift>,
        groups: &[String],
        series: &[(String, Vec<f64>)],
    ) -> Result<()> {
        let values =
            || series.iter().flat_map(|(_, values)| values.iter().copied()).filter(|value| value.is_finite());
        let (low, high) = bounds(values()).context("there is nothing to plot")?;
        ensure!(!groups.is_empty(), "there is nothing to plot");
        let (low, high) = (low.min(0.0), high.max(0.0));
        let mut chart = self
            .builder(area, 56)
            .build_cartesian_2d(0.0..groups.len() as f64, low..low + (beyond(low, high) - low) * HEAD_ROOM)
            .map_err(drawing)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .light_line_style(WHITE)
            .bold_line_style(BLACK.mix(0.12))
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .label_style((FONT, 14))
            .axis_desc_style((FONT, 16))
            .y_label_formatter(&|y| number(*y))
            .draw()
            .map_err(drawing)?;
        // A fifth of each group's room stays empty between it and the next.
        let width = 0.8 / series.len() as f64;
        for (index, ((name, values), colour)) in series.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let bar = |(group, value): (usize, &f64)| {
                let left = group as f64 + 0.1 + index as f64 * width;
                Rectangle::new([(left, 0.0), (left + 0.92 * width, *value)], colour.filled())
            };
            let drawn = values.iter().enumerate().take(groups.len()).filter(|(_, value)| value.is_finite());
            chart
                .draw_series(drawn.map(bar))
                .map_err(drawing)?
                .label(name)
                .legend(|(x, y)| Rectangle::new([(x, y - 4), (x + 14, y + 4)], colour.filled()));
        }
        for (index, group) in groups.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(index as f64 + 0.5, low));
            let style = (FONT, 14).into_text_style(area).pos(text_anchor());
            area.draw(&Text::new(group.clone(), (x, y + 8), style)).map_err(drawing)?;
        }
        self.draw_legend(&mut chart)
    }

    fn builder<'a, 'b>(
        &self,
        area: &'a DrawingArea<SVGBackend<'b>, Shift>,
        x_label_room: u32,
    ) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
        let mut builder = ChartBuilder::on(area);
        builder
            .caption(&self.title, (FONT, 20))
            .margin(16)
            .x_label_area_size(x_label_room)
            .y_label_area_size(72);
        builder
    }

    fn draw_legend<'a, C>(&self, chart: &mut ChartContext<'a, SVGBackend<'a>, C>) -> Result<()>
    where
        C: plotters::coord::CoordTranslate,
    {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .label_font((FONT, 14))
            .draw()
            .map_err(drawing)
    }
}

/// Names of groups stand centred below the axis.
fn text_anchor() -> plotters::style::text_anchor::Pos {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    Pos::new(HPos::Center, VPos::Top)
}

fn finite(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> + '_ {
    points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite())
}

/// The smallest and the largest; `None` when there are none.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |bounds, value| match bounds {
        None => Some((value, value)),
        Some((low, high)) => Some((value.min(low), value.max(high))),
    })
}

/// `high`, or something above `low` when all values are the same: an axis needs a length.
fn beyond(low: f64, high: f64) -> f64 {
    if high > low { high } else { low + low.abs().max(1.0) }
}

/// Short, and without digits that say nothing.
fn number(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 1e6 || (magnitude > 0.0 && magnitude < 1e-3) {
        return format!("{value:.1e}");
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn drawing(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("the plot could not be drawn: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(body: Body) -> Chart {
        Chart { title: "Staleness".into(), x_label: "model".into(), y_label: "clocks".into(), body }
    }

    #[test]
    fn lines_have_title_axes_and_legend() {
        let line = Line { name: "ssp".into(), points: vec![(0.0, 1.0), (f64::NAN, 2.0), (10.0, 3.0)] };
        let svg = chart(Body::Lines(vec![line])).svg().unwrap();
        for text in ["<svg", "Staleness", "model", "clocks", "ssp", "polyline"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn bars_name_their_groups() {
        let body = Body::Bars {
            groups: vec!["uniform".into(), "heuristic".into()],
            series: vec![("paper".into(), vec![1.0, 2.0]), ("ours".into(), vec![1.1, f64::INFINITY])],
        };
        let svg = chart(body).svg().unwrap();
        for text in ["uniform", "heuristic", "paper", "ours"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn one_value_and_no_value() {
        let line = |points| chart(Body::Lines(vec![Line { name: "a".into(), points }]));
        assert!(line(vec![(1.0, 5.0)]).svg().is_ok());
        assert!(line(vec![]).svg().unwrap_err().to_string().contains("nothing to plot"));
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in
            [(0.0, "0"), (0.25, "0.25"), (1500.0, "1500"), (2.5e7, "2.5e7"), (-1e-5, "-1.0e-5")]
        {
            assert_eq!(number(value), text);
        }
    }
}
