//! Who a worker is, as the program that started it says: `paramill launch`, torchrun, MPI or Slurm.

use crate::env_vars;

/// A worker's place among those that were started together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Its rank, from 0.
    pub rank: u32,
    /// How many were started, where the launcher says so.
    pub workers: Option<u32>,
    /// Who says so.
    pub launcher: &'static str,
}

/// A launcher, and the variables that it gives its processes.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    workers: &'static str,
    /// One number alone says nothing: others use the name too.
    needs_both: bool,
}

/// In order: what was started inside of something else is meant.
const LAUNCHERS: [Launcher; 5] = [
    Launcher { name: "paramill launch", rank: env_vars::RANK, workers: env_vars::WORKERS, needs_both: false },
    Launcher { name: "torchrun", rank: "RANK", workers: "WORLD_SIZE", needs_both: true },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        workers: "OMPI_COMM_WORLD_SIZE",
        needs_both: true,
    },
    Launcher { name: "MPI", rank: "PMI_RANK", workers: "PMI_SIZE", needs_both: true },
    // A batch script has a SLURM_PROCID too, but only a step started by srun has this number of tasks.
    Launcher { name: "Slurm", rank: "SLURM_PROCID", workers: "SLURM_STEP_NUM_TASKS", needs_both: true },
];

impl Identity {
    /// What the environment says; `None` when nobody gave this process a rank.
    pub fn from_environment() -> Result<Option<Identity>, String> {
        Identity::find(|name| std::env::var(name).ok())
    }

    /// The same with variables from anywhere.
    pub fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Identity>, String> {
        let number = |name: &str| match variable(name) {
            Some(text) => text.trim().parse::<u32>().map(Some).map_err(|_| format!("{name} is not a number")),
            None => Ok(None),
        };
        for launcher in &LAUNCHERS {
            let (rank, workers) = (number(launcher.rank)?, number(launcher.workers)?);
            if let Some(rank) = rank
                && (workers.is_some() || !launcher.needs_both)
            {
                if let Some(workers) = workers.filter(|workers| rank >= *workers) {
                    return Err(format!(
                        "{} = {rank}, but {} = {workers}: ranks are 0 to {}",
                        launcher.rank,
                        launcher.workers,
                        workers.saturating_sub(1)
                    ));
                }
                return Ok(Some(Identity { rank, workers, launcher: launcher.name }));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &[(&str, &str)]) -> Result<Option<Identity>, String> {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        Identity::find(variable)
    }

    #[test]
    fn every_launcher_is_understood() {
        for (variables, rank, workers, launcher) in [
            (vec![("PARAMILL_RANK", "1")], 1, None, "paramill launch"),
            (vec![("PARAMILL_RANK", "1"), ("PARAMILL_WORKERS", "4")], 1, Some(4), "paramill launch"),
            (vec![("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")], 3, Some(4), "torchrun"),
            (vec![("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")], 0, Some(2), "Open MPI"),
            (vec![("PMI_RANK", "1"), ("PMI_SIZE", "2")], 1, Some(2), "MPI"),
            (vec![("SLURM_PROCID", "7"), ("SLURM_STEP_NUM_TASKS", "8")], 7, Some(8), "Slurm"),
        ] {
            let expected = Identity { rank, workers, launcher };
            assert_eq!(find(&variables), Ok(Some(expected)), "{variables:?}");
        }
    }

    #[test]
    fn our_own_launcher_wins_and_a_batch_script_is_nobody() {
        let inside = [("PARAMILL_RANK", "2"), ("RANK", "0"), ("WORLD_SIZE", "1")];
        assert_eq!(find(&inside).unwrap().unwrap().rank, 2);
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")];
        assert_eq!(find(&batch), Ok(None));
        assert_eq!(find(&[("RANK", "3")]), Ok(None), "others use that name too");
    }

    #[test]
    fn numbers_that_make_no_sense_are_errors() {
        assert!(find(&[("PARAMILL_RANK", "first")]).unwrap_err().contains("PARAMILL_RANK is not a number"));
        let beyond = find(&[("RANK", "4"), ("WORLD_SIZE", "4")]).unwrap_err();
        assert!(beyond.contains("ranks are 0 to 3"), "{beyond}");
    }
}
