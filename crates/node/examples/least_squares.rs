//! A whole worker: `paramill launch -n 4 -s 2 -- target/release/examples/least_squares`.

#![allow(clippy::disallowed_macros, reason = "it has nothing else to say, and nothing to lose")]

use paramill_node::client::{Job, JobOptions, TableSpec};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let job = Job::init(JobOptions::from_environment()?)?;
    let w = job.table(TableSpec::dense("w", [1000]), vec![0.0; 1000])?;
    job.start()?;
    for _ in job.iteration()..50 {
        let gradient: Vec<f32> = w.read(|w| w.iter().map(|w| w - 3.0).collect())?; // of (w - 3)² / 2
        w.update(&gradient)?; // leaves now; the new parameters follow when the condition allows
        job.clock();
        w.sync()?; // waits for them, and says who is missing if they do not come
    }
    println!("w[0] = {:.3}", w.read(|w| w[0])?);
    Ok(job.close()?)
}
