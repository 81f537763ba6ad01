//! Where the processes of an exchange run: side by side on this machine, or each behind a command that takes it to a
//! place and an address of its own, such as a network namespace.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::process::Command;

/// Stands for the number of a process in the command that it is run with.
const NUMBER: &str = "{}";
const LOOPBACK: &str = "127.0.0.1";

/// A place for every process. They are numbered from 0, servers first.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Endpoints {
    /// The words before every process's own command.
    run_with: Vec<String>,
    /// The address of each server; loopback for all of them when there is none.
    hosts: Vec<String>,
    /// So many places are there; processes beyond them are where the first ones are.
    places: Option<u32>,
}

impl Endpoints {
    /// What was typed, or why it cannot work.
    pub(super) fn resolve(
        run_with: Option<&str>,
        hosts: &[String],
        servers: u32,
        colocated: bool,
    ) -> Result<Endpoints> {
        let run_with: Vec<String> =
            run_with.into_iter().flat_map(str::split_whitespace).map(str::to_owned).collect();
        ensure!(
            hosts.is_empty() || hosts.len() == servers as usize,
            "--host was given {} times: give one address for each of {servers} servers",
            hosts.len()
        );
        ensure!(
            run_with.is_empty() || run_with.iter().any(|word| word.contains(NUMBER)),
            "--run-with takes all processes to the same place: put {NUMBER} where the number of the process belongs"
        );
        Ok(Endpoints { run_with, hosts: hosts.to_vec(), places: colocated.then_some(servers) })
    }

    /// This program, to be started as process `number`; its arguments are still to come.
    pub(super) fn command(&self, number: u32) -> Result<Command> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let number = self.places.map_or(number, |places| number % places.max(1));
        let mut words = self.run_with.iter().map(|word| word.replace(NUMBER, &number.to_string()));
        let Some(first) = words.next() else { return Ok(Command::new(program)) };
        let mut command = Command::new(first);
        command.args(words).arg(program);
        Ok(command)
    }

    /// The address that a server listens on.
    pub(super) fn host(&self, server: u32) -> &str {
        self.hosts.get(server as usize).map_or(LOOPBACK, String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_run_behind_its_command_and_a_server_has_its_address() {
        let endpoints = Endpoints {
            run_with: ["ip", "netns", "exec", "lab{}"].map(str::to_owned).to_vec(),
            hosts: vec!["10.0.0.1".into(), "10.0.0.2".into()],
            places: None,
        };
        let colocated = Endpoints { places: Some(2), ..endpoints.clone() };
        let place = |number| colocated.command(number).unwrap().get_args().nth(2).unwrap().to_owned();
        assert_eq!([place(1), place(2), place(3)], ["lab1", "lab0", "lab1"]);
        let command = endpoints.command(2).unwrap();
        assert_eq!(command.get_program(), "ip");
        let arguments: Vec<_> = command.get_args().take(3).collect();
        assert_eq!(arguments, ["netns", "exec", "lab2"]);
        assert_eq!(command.get_args().count(), 4);
        assert_eq!(endpoints.host(1), "10.0.0.2");
        let side_by_side = Endpoints::default();
        assert_eq!(side_by_side.command(7).unwrap().get_args().count(), 0);
        assert_eq!(side_by_side.host(1), "127.0.0.1");
    }
}
