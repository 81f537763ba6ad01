//! A parameter server small enough to be seen correct at a glance: all workers in one loop, no messages.
//!
//! What a real cluster reaches is compared with what this reaches.

use paramill_train::{Evaluation, Touched, Workload, WorkloadConfig, build_all};

/// Update rules, with their learning rates.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    Sgd(f32),
    Momentum(f32),
    AdaGrad(f32),
    Adam(f32),
}

/// Workers with the tables they share.
pub(crate) struct Reference {
    workers: Vec<Box<dyn Workload>>,
    tables: Vec<Vec<f32>>,
    /// What each worker last pulled; only used without synchrony.
    pulled: Vec<Vec<Vec<f32>>>,
    widths: Vec<usize>,
    rule: Rule,
    slots: [Vec<Vec<f32>>; 2],
    updates: i32,
}

impl Reference {
    pub(crate) fn new(config: &WorkloadConfig, rule: Rule) -> Reference {
        let workers = build_all(config).expect("the configuration of a test is right");
        let specs = workers[0].tables();
        let tables: Vec<Vec<f32>> = (0..specs.len()).map(|table| workers[0].initial(table)).collect();
        let zeros: Vec<Vec<f32>> = tables.iter().map(|table| vec![0.0; table.len()]).collect();
        Reference {
            pulled: vec![tables.clone(); workers.len()],
            widths: specs.iter().map(|spec| spec.row_elements() as usize).collect(),
            slots: [zeros.clone(), zeros],
            workers,
            tables,
            rule,
            updates: 0,
        }
    }

    /// An epoch in lock step: the mean of all workers' gradients is one update. Returns the mean loss.
    pub(crate) fn epoch(&mut self, epoch: u64) -> f32 {
        let steps = self.workers[0].steps_per_epoch();
        let mut loss = 0.0;
        for step in epoch * steps..(epoch + 1) * steps {
            let mut sum: Vec<Vec<f32>> = self.tables.iter().map(|table| vec![0.0; table.len()]).collect();
            for worker in &mut self.workers {
                loss += add_gradient(worker.as_mut(), step, &self.tables, &self.widths, &mut sum);
            }
            self.update(&sum);
        }
        loss / (steps * self.workers.len() as u64) as f32
    }

    /// An epoch without any waiting: workers take turns, each computes on what it pulled after its own last push, so
    /// that a gradient is `workers - 1` updates old.
    pub(crate) fn epoch_without_waiting(&mut self, epoch: u64) -> f32 {
        let steps = self.workers[0].steps_per_epoch();
        let mut loss = 0.0;
        for step in epoch * steps..(epoch + 1) * steps {
            for rank in 0..self.workers.len() {
                let mut gradient: Vec<Vec<f32>> =
                    self.tables.iter().map(|table| vec![0.0; table.len()]).collect();
                let worker = self.workers[rank].as_mut();
                loss += add_gradient(worker, step, &self.pulled[rank], &self.widths, &mut gradient);
                self.update(&gradient);
                self.pulled[rank].clone_from(&self.tables);
            }
        }
        loss / (steps * self.workers.len() as u64) as f32
    }

    pub(crate) fn evaluate(&self) -> Evaluation {
        let tables: Vec<&[f32]> = self.tables.iter().map(Vec::as_slice).collect();
        self.workers[0].evaluate(&tables)
    }

    fn update(&mut self, sum: &[Vec<f32>]) {
        self.updates += 1;
        let share = 1.0 / self.workers.len() as f32;
        let [first, second] = &mut self.slots;
        let (decay1, decay2) = (1.0 - 0.9f32.powi(self.updates), 1.0 - 0.999f32.powi(self.updates));
        for (table, sum) in sum.iter().enumerate() {
            for (i, sum) in sum.iter().enumerate() {
                let gradient = sum * share;
                let (m, v) = (&mut first[table][i], &mut second[table][i]);
                self.tables[table][i] -= match self.rule {
                    Rule::Sgd(lr) => lr * gradient,
                    Rule::Momentum(lr) => {
                        *m = 0.9 * *m + gradient;
                        lr * *m
                    }
                    Rule::AdaGrad(lr) => {
                        *v += gradient * gradient;
                        lr * gradient / (v.sqrt() + 1e-10)
                    }
                    Rule::Adam(lr) => {
                        *m = 0.9 * *m + 0.1 * gradient;
                        *v = 0.999 * *v + 0.001 * gradient * gradient;
                        lr * (*m / decay1) / ((*v / decay2).sqrt() + 1e-8)
                    }
                };
            }
        }
    }
}

/// One step of a worker: its gradient is added to `sum`, its loss returned.
fn add_gradient(
    worker: &mut dyn Workload,
    step: u64,
    tables: &[Vec<f32>],
    widths: &[usize],
    sum: &mut [Vec<f32>],
) -> f32 {
    let touched = worker.prepare(step);
    let rows = |table: usize| match &touched[table] {
        Touched::All => (0..(tables[table].len() / widths[table]) as u32).collect(),
        Touched::Rows(rows) => rows.clone(),
    };
    let range = |table: usize, row: u32| {
        let start = row as usize * widths[table];
        start..start + widths[table]
    };
    let gather = |table: usize| -> Vec<f32> {
        rows(table).into_iter().flat_map(|row| tables[table][range(table, row)].iter().copied()).collect()
    };
    let pulled: Vec<Vec<f32>> = (0..tables.len()).map(gather).collect();
    let pulled: Vec<&[f32]> = pulled.iter().map(Vec::as_slice).collect();
    let mut gradients = vec![Vec::new(); tables.len()];
    let loss = worker.step(&pulled, &mut gradients);
    for (table, gradient) in gradients.iter().enumerate() {
        let width = widths[table];
        for (row, gradient) in rows(table).into_iter().zip(gradient.chunks(width)) {
            for (sum, gradient) in sum[table][range(table, row)].iter_mut().zip(gradient) {
                *sum += gradient;
            }
        }
    }
    loss
}
