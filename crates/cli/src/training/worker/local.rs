//! The policy `local`: a worker steps its own parameters, and synchronises fragments of the model when they are due.

use super::Trained;
use anyhow::{Context, Result};
use paramill_core::local::{LocalSteps, Replica, inner_optimizer};
use paramill_core::optimizer::OptimizerPolicy;
use paramill_core::registry::Registry;
use paramill_node::client::Job;
use paramill_train::Workload;

/// A worker's own steps.
pub(super) struct LocalTraining {
    steps: LocalSteps,
    inner: OptimizerPolicy,
    /// One for each table, once the job has started.
    replicas: Vec<Replica>,
    /// Of each table.
    fragments: Vec<usize>,
    /// Whether a fragment was pushed, and its answer not merged yet.
    in_flight: Vec<bool>,
    pseudo_gradient: Vec<f32>,
}

impl LocalTraining {
    /// Says that this worker follows the job's policy. Called before the job starts.
    pub(super) fn new(job: &Job, workload: &dyn Workload, tables: &[Trained]) -> Result<LocalTraining> {
        let steps = job.local_steps()?.context("the job has no local steps, and its plan has")?;
        let usual = paramill_train::find(workload.name())?.optimizer;
        let inner = inner_optimizer(&Registry::builtin(), steps.inner().unwrap_or(usual))?;
        let sizes: Vec<u64> = tables.iter().map(|trained| trained.table.spec().elements()).collect();
        let fragments = steps.deal(&sizes)?;
        let in_flight = vec![false; steps.fragments()];
        Ok(LocalTraining {
            steps,
            inner,
            replicas: Vec::new(),
            fragments,
            in_flight,
            pseudo_gradient: Vec::new(),
        })
    }

    /// Takes the servers' parameters. Returns the step of the job that comes next.
    pub(super) fn begin(&mut self, job: &Job, tables: &mut [Trained]) -> Result<u64> {
        for trained in tables {
            trained.table.read(|values| trained.values = values.to_vec())?;
            self.replicas.push(Replica::new(&trained.values, &self.inner));
        }
        Ok(self.steps.first_step(job.iteration()))
    }

    /// Steps by the gradients that were computed, and synchronises what is due then.
    pub(super) fn step(
        &mut self,
        job: &Job,
        tables: &mut [Trained],
        gradients: &[Vec<f32>],
        step: u64,
    ) -> Result<()> {
        for ((trained, replica), gradient) in tables.iter_mut().zip(&mut self.replicas).zip(gradients) {
            replica.step(&self.inner, step, &mut trained.values, gradient);
        }
        let made = step + 1;
        if let Some(fragment) = self.steps.merged_after(made).filter(|_| self.steps.late() > 0) {
            self.merge(tables, fragment)?;
        }
        if let Some(fragment) = self.steps.pushed_after(made) {
            self.push(tables, fragment)?;
            if self.steps.late() == 0 {
                self.merge(tables, fragment)?;
            }
        }
        if self.steps.turns_after(made) {
            job.clock();
        }
        Ok(())
    }

    /// After the last step: merges what is under way, and pushes what has changed since it was pushed.
    pub(super) fn finish(&mut self, job: &Job, tables: &mut [Trained], total: u64) -> Result<()> {
        for fragment in 0..self.in_flight.len() {
            self.merge(tables, fragment)?;
        }
        let (first, clocks) = self.steps.closing(total);
        // A worker that joined now takes part from the clock on where the job is.
        for fragments in clocks.iter().zip(first..).filter(|(_, clock)| *clock >= job.iteration()) {
            for fragment in fragments.0 {
                self.push(tables, *fragment)?;
            }
            job.clock();
            for fragment in fragments.0 {
                self.merge(tables, *fragment)?;
            }
        }
        Ok(())
    }

    fn push(&mut self, tables: &mut [Trained], fragment: usize) -> Result<()> {
        let mut gradient = std::mem::take(&mut self.pseudo_gradient);
        for (trained, replica) in self.of_fragment(tables, fragment) {
            replica.pseudo_gradient(&trained.values, &mut gradient);
            trained.table.update(&gradient)?;
        }
        self.pseudo_gradient = gradient;
        self.in_flight[fragment] = true;
        Ok(())
    }

    /// Waits for a fragment's answer, if there is one to come.
    fn merge(&mut self, tables: &mut [Trained], fragment: usize) -> Result<()> {
        if !std::mem::take(&mut self.in_flight[fragment]) {
            return Ok(());
        }
        for (trained, replica) in self.of_fragment(tables, fragment) {
            trained.table.sync()?;
            trained.table.read(|answer| replica.merge(&mut trained.values, answer))?;
        }
        Ok(())
    }

    fn of_fragment<'a>(
        &'a mut self,
        tables: &'a mut [Trained],
        fragment: usize,
    ) -> impl Iterator<Item = (&'a mut Trained, &'a mut Replica)> {
        let pairs = tables.iter_mut().zip(&mut self.replicas).zip(&self.fragments);
        pairs.filter(move |(_, own)| **own == fragment).map(|(pair, _)| pair)
    }
}
