//! Step times from a file.

use super::FaultError;
use crate::types::{Clock, WorkerId};
use std::collections::BTreeMap;

/// The times that steps took, as a table of `worker,step,seconds` lines tells. A header line is optional.
///
/// The numbers of workers and steps only give an order: worker `w` of a job replays the trace's worker number
/// `w` (modulo their number), and a worker's steps repeat when they are used up.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTrace {
    workers: Vec<Vec<f64>>,
}

impl StepTrace {
    /// Reads a trace. The error names the line.
    pub fn parse(text: &str) -> Result<StepTrace, FaultError> {
        let mut rows: BTreeMap<u32, BTreeMap<u64, f64>> = BTreeMap::new();
        let mut first = true;
        for (index, line) in text.lines().enumerate() {
            let wrong = |why: String| FaultError::Trace { line: index + 1, why };
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            let is_header = std::mem::take(&mut first) && line.replace(' ', "") == "worker,step,seconds";
            if is_header {
                continue;
            }
            let (worker, step, seconds) = row(line).map_err(wrong)?;
            if rows.entry(worker).or_default().insert(step, seconds).is_some() {
                return Err(wrong(format!("step {step} of worker {worker} is given twice")));
            }
        }
        if rows.is_empty() {
            let why = "there is no line of the form `worker,step,seconds`".into();
            return Err(FaultError::Trace { line: 0, why });
        }
        Ok(StepTrace { workers: rows.into_values().map(|steps| steps.into_values().collect()).collect() })
    }

    /// How long this step took.
    pub fn seconds(&self, worker: WorkerId, step: Clock) -> f64 {
        let steps = &self.workers[worker.0 as usize % self.workers.len()];
        steps[(step % steps.len() as u64) as usize]
    }

    /// How many workers the trace has.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }
}

fn row(line: &str) -> Result<(u32, u64, f64), String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [worker, step, seconds] = fields[..] else {
        return Err(format!("`{line}`: expected three fields, worker,step,seconds"));
    };
    let whole = |field: &str, name: &str| {
        field.parse::<u32>().map_err(|_| format!("{name} `{field}`: expected a whole number of at least 0"))
    };
    let time = seconds.parse::<f64>().ok().filter(|time| (0.0..=1e6).contains(time));
    let time = time.ok_or_else(|| format!("seconds `{seconds}`: expected a number from 0 to 1e6"))?;
    Ok((whole(worker, "worker")?, u64::from(whole(step, "step")?), time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_over_workers_and_steps() {
        let trace = StepTrace::parse("worker, step, seconds\n5,10,0.25\n5,11,0.5\n\n0,3,1e-3\n").unwrap();
        assert_eq!(trace.workers(), 2);
        let seconds = |worker, step| trace.seconds(WorkerId(worker), step);
        assert_eq!([seconds(0, 0), seconds(0, 9), seconds(1, 0), seconds(1, 1)], [1e-3, 1e-3, 0.25, 0.5]);
        assert_eq!(seconds(3, 4), seconds(1, 0));
    }

    #[test]
    fn errors_name_the_line_and_what_was_expected() {
        for (text, expected) in [
            ("", "no line of the form"),
            ("worker,step,seconds\n", "no line of the form"),
            ("0,0,1\n0,1\n", "line 2 of the step trace: `0,1`: expected three fields"),
            ("0,0,1\n\n0,0,2\n", "line 3 of the step trace: step 0 of worker 0 is given twice"),
            ("x,0,1\n", "worker `x`: expected a whole number"),
            ("0,-1,1\n", "step `-1`"),
            ("0,0,-1\n", "seconds `-1`: expected a number from 0"),
            ("0,0,NaN\n", "seconds `NaN`"),
            ("0,0,1\nworker,step,seconds\n", "line 2"),
        ] {
            let error = StepTrace::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
