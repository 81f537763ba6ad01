//! Ports that data cores listen on, where a firewall asks for known ones.

use std::fmt;
use std::io;
use std::str::FromStr;

/// Ports from the first to the last, both included; their text form is `7100-7115`, or `7100` for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    /// How many there are.
    pub fn count(self) -> u32 {
        u32::from(self.last) - u32::from(self.first) + 1
    }
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Ports, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(Ports { first, last }),
            _ => Err(format!("`{text}`: expected ports from 1 to 65535, such as 7100-7115")),
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ports { first, last } if first == last => write!(f, "{first}"),
            Ports { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

/// Gives the data cores of a server their ports, in order. Ports in use by others are passed over.
#[derive(Debug)]
pub(crate) struct PortSupply {
    /// `None`: the system chooses.
    ports: Option<Ports>,
    cores: u32,
    given: u32,
    in_use: Vec<u16>,
}

impl PortSupply {
    /// For so many data cores, which need a port each.
    pub(crate) fn new(ports: Option<Ports>, cores: u32) -> io::Result<PortSupply> {
        if let Some(ports) = ports.filter(|ports| ports.count() < cores) {
            let sentence = format!(
                "ports {ports} are {}, and {cores} data cores need one each; give at least {cores} ports, or fewer data cores",
                ports.count()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, sentence));
        }
        Ok(PortSupply { ports, cores, given: 0, in_use: Vec::new() })
    }

    /// There is one more data core than was said at first.
    pub(crate) fn expect_another(&mut self) {
        self.cores += 1;
    }

    /// Listens on the next port that is free, 0 being one that the system chooses. `listen` may be called with several.
    pub(crate) fn listen<T>(&mut self, mut listen: impl FnMut(u16) -> io::Result<T>) -> io::Result<T> {
        let Some(ports) = self.ports else { return listen(0) };
        let taken = self.given + self.in_use.len() as u32;
        for port in (ports.first..=ports.last).skip(taken as usize) {
            match listen(port) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => self.in_use.push(port),
                other => {
                    self.given += 1;
                    return other;
                }
            }
        }
        let in_use: Vec<String> = self.in_use.iter().map(u16::to_string).collect();
        let (in_use, remedy) = match in_use.as_slice() {
            [] => (String::new(), "give more ports"),
            in_use => (
                format!(", and these are in use already: {}", in_use.join(", ")),
                "give more ports, or end the programs that use them",
            ),
        };
        let sentence = format!(
            "ports {ports} are too few: {} data cores need one each, {} got one{in_use}; {remedy}",
            self.cores, self.given
        );
        Err(io::Error::new(io::ErrorKind::AddrInUse, sentence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(port: u16) -> io::Result<u16> {
        match port {
            7101 | 7103 => Err(io::ErrorKind::AddrInUse.into()),
            80 => Err(io::ErrorKind::PermissionDenied.into()),
            port => Ok(port),
        }
    }

    #[test]
    fn a_range_is_two_ports_in_order_or_one() {
        for (text, count) in [("7100-7115", 16), ("7100", 1), ("1-65535", 65535)] {
            let ports: Ports = text.parse().unwrap();
            assert_eq!((ports.count(), ports.to_string().as_str()), (count, text));
        }
        for text in ["", "0", "0-10", "7115-7100", "7100-", "-7100", "7100-70000", "a-b", "7100-7101-7102"] {
            let why = text.parse::<Ports>().unwrap_err();
            assert_eq!(why, format!("`{text}`: expected ports from 1 to 65535, such as 7100-7115"));
        }
    }

    #[test]
    fn ports_in_use_are_passed_over_and_named_when_the_range_runs_out() {
        let mut supply = PortSupply::new(Some("7100-7104".parse().unwrap()), 4).unwrap();
        let ports: Vec<u16> = (0..3).map(|_| supply.listen(busy).unwrap()).collect();
        assert_eq!(ports, [7100, 7102, 7104]);
        let why = supply.listen(busy).unwrap_err().to_string();
        let expected = "ports 7100-7104 are too few: 4 data cores need one each, 3 got one, and these are in use already: \
                        7101, 7103;";
        assert!(why.starts_with(expected), "{why}");
    }

    #[test]
    fn a_range_that_cannot_be_enough_is_refused_before_anything_listens() {
        let why = PortSupply::new(Some("7100-7102".parse().unwrap()), 4).unwrap_err().to_string();
        assert!(why.starts_with("ports 7100-7102 are 3, and 4 data cores need one each;"), "{why}");
    }

    #[test]
    fn other_errors_are_not_passed_over_and_without_a_range_the_system_chooses() {
        let mut supply = PortSupply::new(Some("80-90".parse().unwrap()), 1).unwrap();
        assert_eq!(supply.listen(busy).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(PortSupply::new(None, 9).unwrap().listen(busy).unwrap(), 0);
    }
}
