//! The optimum of an instance of P3 by trying every tree.

use crate::instance::Instance;
use paramill_core::broadcast::Parent;

/// The least cost of all trees within the instance's bounds; `None` if there is no such tree.
pub(crate) fn optimum(instance: &Instance) -> Option<f64> {
    let count = instance.receivers();
    let mut search =
        Search { instance, parents: vec![None; count], children: vec![0; count + 1], least: None };
    search.go_on(0, 0.0);
    search.least
}

struct Search<'a> {
    instance: &'a Instance,
    /// Of the receivers that have one so far: the first ones.
    parents: Vec<Option<Parent>>,
    /// Of each receiver, and of the root at last.
    children: Vec<usize>,
    least: Option<f64>,
}

impl Search<'_> {
    /// Tries every parent of receiver `next`, and of all that follow. `cost` is that of the connections so far: it only grows,
    /// so that trees which cost too much before they are complete need not be completed.
    fn go_on(&mut self, next: usize, cost: f64) {
        if self.least.is_some_and(|least| cost >= least - 1e-9) {
            return;
        }
        let count = self.parents.len();
        if next == count {
            let parents: Vec<Parent> =
                self.parents.iter().copied().map(|parent| parent.expect("all have one")).collect();
            if (0..count).all(|receiver| self.is_near(receiver)) {
                let cost = self.instance.cost(&parents);
                self.least = Some(self.least.map_or(cost, |least| least.min(cost)));
            }
            return;
        }
        for above in 0..=count {
            let parent = if above == count { Parent::Root } else { Parent::Receiver(above) };
            let can = above == count || self.instance.can_relay(above);
            if above == next || !can || self.children[above] == self.instance.degree {
                continue;
            }
            self.parents[next] = Some(parent);
            self.children[above] += 1;
            self.go_on(next + 1, cost + self.instance.connection(parent, next));
            self.children[above] -= 1;
            self.parents[next] = None;
        }
    }

    /// Whether a walk of at most so many steps as the depth leads to the root. It never does from a cycle.
    fn is_near(&self, receiver: usize) -> bool {
        let mut at = Parent::Receiver(receiver);
        for _ in 0..self.instance.depth {
            let Parent::Receiver(receiver) = at else { break };
            at = self.parents[receiver].expect("all have one");
        }
        at == Parent::Root
    }
}
