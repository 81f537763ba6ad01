//! Which shards move when servers come, go or are loaded unevenly: elastic parameter slicing (FluentPS, section III-A).
//!
//! Placement says what a shard holds, for life. This says where shards are served, from where they are now: as evenly as their loads
//! allow, with as few bytes moved as that takes.

/// A shard, as far as its place is concerned. Servers are numbered from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// The server that serves it; `None` where it cannot stay.
    pub at: Option<usize>,
    /// Another server that has a copy of it: moving it there moves nothing.
    pub copy: Option<usize>,
    /// What it adds to its server's load, in any unit.
    pub load: u64,
    /// What it takes to move it.
    pub bytes: u64,
}

impl Slice {
    /// What it takes to have a server serve it.
    fn cost(&self, server: usize) -> u64 {
        if self.at == Some(server) || self.copy == Some(server) { 0 } else { self.bytes }
    }
}

/// A shard, by its number in the list, and the server that is to serve it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The shard.
    pub slice: usize,
    /// The server.
    pub to: usize,
}

/// So many cases are looked at for a cheaper way to the same balance. Enough for all cases of a few shards; with many shards, that are
/// of about one size, the first way that is found is as cheap as any.
const SEARCH_CASES: u32 = 20_000;

/// The moves after which so many servers (at least 1) are loaded evenly: no further move of a single shard would bring two of them closer
/// together by more than a tenth of that shard. Asked again after these moves the answer is none, so that shards do not move to and fro.
pub fn moves(slices: &[Slice], servers: usize) -> Vec<Move> {
    let mut places: Vec<usize> = Vec::with_capacity(slices.len());
    let mut loads = vec![0; servers];
    for slice in slices {
        // Until its place is found, one that cannot stay counts nowhere.
        places.push(slice.at.unwrap_or(usize::MAX));
        slice.at.into_iter().for_each(|at| loads[at] += slice.load);
    }
    let mut homeless: Vec<usize> = (0..slices.len()).filter(|at| slices[*at].at.is_none()).collect();
    homeless.sort_by_key(|at| std::cmp::Reverse(slices[*at].load));
    for at in homeless {
        let least = (0..servers).min_by_key(|server| (loads[*server], slices[at].cost(*server), *server));
        places[at] = least.unwrap_or(0);
        loads[places[at]] += slices[at].load;
    }
    level(slices, &mut places, servers);
    // A cheaper way may leave room for a further step. Loads become more even, or as even for less.
    while cheapen(slices, &mut places, servers) {
        level(slices, &mut places, servers);
    }
    let is_new = |(at, to): &(usize, &usize)| slices[*at].at != Some(**to);
    places.iter().enumerate().filter(is_new).map(|(slice, to)| Move { slice, to: *to }).collect()
}

/// What moves cost.
pub fn bytes_of(slices: &[Slice], moves: &[Move]) -> u64 {
    moves.iter().map(|step| slices[step.slice].cost(step.to)).sum()
}

/// The load of each server.
fn loads_of(slices: &[Slice], places: &[usize], servers: usize) -> Vec<u64> {
    let mut loads = vec![0; servers];
    slices.iter().zip(places).for_each(|(slice, at)| loads[*at] += slice.load);
    loads
}

/// How uneven loads are: the sum of their squares, which every step of [`level`] makes smaller.
fn unevenness(loads: &[u64]) -> u128 {
    loads.iter().map(|load| u128::from(*load).pow(2)).sum()
}

/// Moves single shards from more to less loaded servers until that does not help; of equally good steps the cheapest.
fn level(slices: &[Slice], places: &mut [usize], servers: usize) {
    let mut loads = loads_of(slices, places, servers);
    loop {
        let least = (0..servers).min_by_key(|server| (loads[*server], *server)).unwrap_or(0);
        let steps = slices.iter().zip(&*places).enumerate().filter_map(|(number, (slice, at))| {
            let gap = loads[*at] - loads[least];
            // Below that the step would all but exchange the two servers.
            let helps = slice.load > 0 && u128::from(slice.load) * 11 <= u128::from(gap) * 10;
            let gain = u128::from(slice.load) * u128::from(gap.saturating_sub(slice.load));
            let price = slice.cost(least).saturating_sub(slice.cost(*at));
            helps.then_some(((gain, std::cmp::Reverse((price, number))), number))
        });
        let Some((_, number)) = steps.max() else { return };
        loads[places[number]] -= slices[number].load;
        loads[least] += slices[number].load;
        places[number] = least;
    }
}

/// Looks for places that are no less even and cost less, and takes the cheapest. Whether there were any.
fn cheapen(slices: &[Slice], places: &mut [usize], servers: usize) -> bool {
    let cost = slices.iter().zip(&*places).map(|(slice, at)| slice.cost(*at)).sum();
    let mut order: Vec<usize> = (0..slices.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse((slices[*at].bytes, slices[*at].load)));
    let mut search = Search {
        slices,
        order,
        bound: unevenness(&loads_of(slices, places, servers)),
        cheapest: cost,
        loads: vec![0; servers],
        places: places.to_vec(),
        cases: SEARCH_CASES,
    };
    let found = if cost > 0 { search.run(0, 0, 0) } else { None };
    found.iter().for_each(|found| places.copy_from_slice(found));
    found.is_some()
}

/// A search through all ways to place shards.
struct Search<'a> {
    slices: &'a [Slice],
    /// The shards that cost most come first.
    order: Vec<usize>,
    /// Places must be at least as even.
    bound: u128,
    /// They must cost less.
    cheapest: u64,
    loads: Vec<u64>,
    places: Vec<usize>,
    cases: u32,
}

impl Search<'_> {
    /// Places the shards from this one on. Returns the cheapest places, if any are cheaper than what was known.
    fn run(&mut self, next: usize, cost: u64, uneven: u128) -> Option<Vec<usize>> {
        if cost >= self.cheapest || uneven > self.bound || self.cases == 0 {
            return None;
        }
        let Some(number) = self.order.get(next).copied() else {
            self.cheapest = cost;
            return Some(self.places.clone());
        };
        self.cases -= 1;
        let slice = self.slices[number];
        let mut servers: Vec<usize> = (0..self.loads.len()).collect();
        // Where it costs nothing comes first: every later way has to be cheaper than one that is known.
        servers.sort_by_key(|server| (slice.cost(*server), self.loads[*server], *server));
        let mut found = None;
        for server in servers {
            let (before, after) = (self.loads[server], self.loads[server] + slice.load);
            let grown = u128::from(after).pow(2) - u128::from(before).pow(2);
            (self.loads[server], self.places[number]) = (after, server);
            found = self.run(next + 1, cost + slice.cost(server), uneven + grown).or(found);
            self.loads[server] = before;
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slice(at: usize, size: u64) -> Slice {
        Slice { at: Some(at), copy: None, load: size, bytes: size }
    }

    fn applied(slices: &[Slice], moves: &[Move]) -> Vec<Slice> {
        let mut slices = slices.to_vec();
        moves.iter().for_each(|step| slices[step.slice].at = Some(step.to));
        slices
    }

    fn loads(slices: &[Slice], servers: usize) -> Vec<u64> {
        let places: Vec<usize> = slices.iter().map(|slice| slice.at.unwrap()).collect();
        loads_of(slices, &places, servers)
    }

    #[test]
    fn a_second_and_a_third_server_get_their_shares_and_nothing_else_moves() {
        let slices = [slice(0, 10); 6];
        let second = moves(&slices, 2);
        assert_eq!((second.len(), bytes_of(&slices, &second)), (3, 30));
        let slices = applied(&slices, &second);
        let third = moves(&slices, 3);
        assert_eq!(bytes_of(&slices, &third), 20, "a shard of each server");
        assert_eq!(loads(&applied(&slices, &third), 3), [20, 20, 20]);
    }

    #[test]
    fn what_cannot_stay_moves_and_nothing_else_does() {
        let mut slices = [slice(0, 10), slice(1, 10), slice(2, 10), slice(2, 10)];
        (slices[2].at, slices[3].at) = (None, None);
        let found = moves(&slices, 2);
        assert_eq!(found.iter().map(|step| step.slice).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(loads(&applied(&slices, &found), 2), [20, 20]);
    }

    #[test]
    fn one_shard_is_not_moved_from_one_server_to_another_that_has_none() {
        assert_eq!(moves(&[slice(0, 10)], 3), []);
        // Nor one that is a little smaller than its neighbour, for a balance that is hardly better.
        assert_eq!(moves(&[slice(0, 100), slice(0, 95), slice(1, 96)], 2), []);
        assert_eq!(moves(&[], 3), []);
    }

    #[test]
    fn a_hot_shard_is_left_alone_with_its_server() {
        let hot = Slice { load: 900, ..slice(0, 10) };
        let slices = [hot, slice(0, 10), slice(0, 10), slice(1, 10)];
        let found = moves(&slices, 2);
        assert_eq!(found, [Move { slice: 1, to: 1 }, Move { slice: 2, to: 1 }]);
    }

    #[test]
    fn a_shard_moves_to_where_its_copy_is() {
        let copied = Slice { copy: Some(1), ..slice(0, 10) };
        let slices = [slice(0, 10), copied, slice(0, 10), slice(1, 10)];
        let found = moves(&slices, 2);
        assert_eq!((found.clone(), bytes_of(&slices, &found)), (vec![Move { slice: 1, to: 1 }], 0));
    }

    /// The least bytes for places that are as even as these, by trying everything.
    fn fewest_bytes(slices: &[Slice], servers: usize, bound: u128) -> u64 {
        let mut fewest = u64::MAX;
        for case in 0..servers.pow(slices.len() as u32) {
            let places: Vec<usize> =
                (0..slices.len()).map(|at| case / servers.pow(at as u32) % servers).collect();
            if unevenness(&loads_of(slices, &places, servers)) <= bound {
                let cost = slices.iter().zip(&places).map(|(slice, at)| slice.cost(*at)).sum();
                fewest = fewest.min(cost);
            }
        }
        fewest
    }

    fn world(
        count: std::ops::Range<usize>,
        servers: std::ops::Range<usize>,
    ) -> impl Strategy<Value = (Vec<Slice>, usize)> {
        servers.prop_flat_map(move |servers| {
            let at = prop::option::weighted(0.9, 0..servers);
            let slice = (at, prop::option::weighted(0.2, 0..servers), 1u64..50, 1u64..50);
            let slice = slice.prop_map(|(at, copy, load, bytes)| Slice { at, copy, load, bytes });
            (prop::collection::vec(slice, count.clone()), Just(servers))
        })
    }

    proptest! {
        /// At most 1.05 times the bytes that must move for that balance; of so few shards, no byte more than these.
        #[test]
        fn no_way_to_the_same_balance_moves_less((slices, servers) in world(0..7, 1..4)) {
            let found = moves(&slices, servers);
            let bound = unevenness(&loads(&applied(&slices, &found), servers));
            prop_assert_eq!(bytes_of(&slices, &found), fewest_bytes(&slices, servers, bound));
        }

        /// With many shards of about one size, the surplus of each server has to leave it, to within a shard.
        #[test]
        fn many_shards_move_at_most_what_must_leave(
            sizes in prop::collection::vec((0usize..4, 1000u64..1010), 8..200),
            servers in 4usize..8,
        ) {
            let slices: Vec<Slice> = sizes.iter().map(|(at, size)| slice(*at, *size)).collect();
            let found = moves(&slices, servers);
            let share = slices.iter().map(|slice| slice.load).sum::<u64>() / servers as u64;
            let must: u64 = loads(&slices, servers).iter().map(|load| load.saturating_sub(share)).sum();
            let moved = bytes_of(&slices, &found);
            prop_assert!(moved as f64 <= 1.05 * (must + 4 * 1010) as f64, "{} for {}", moved, must);
        }

        #[test]
        fn the_result_is_balanced_as_far_as_shards_allow_and_stays((slices, servers) in world(0..40, 1..6)) {
            let found = moves(&slices, servers);
            prop_assert!(found.iter().all(|step| slices[step.slice].at != Some(step.to)));
            let after = applied(&slices, &found);
            let loads = loads(&after, servers);
            let least = *loads.iter().min().unwrap();
            for slice in &after {
                let gap = loads[slice.at.unwrap()] - least;
                prop_assert!(slice.load * 11 > gap * 10, "{:?} in {:?}", slice, loads);
            }
            prop_assert_eq!(moves(&after, servers), vec![]);
        }
    }
}
