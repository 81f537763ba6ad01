//! FluentPS, Table III: every row as a model and as an expression trains the same parameters, bit for bit.

use paramill_core::consistency::SyncStats;
use paramill_core::policy::Axis;
use paramill_sim::report::run_scenario;
use paramill_sim::scenario::Scenario;

#[test]
fn models_and_their_expressions_train_the_same_parameters() {
    for (model, expression) in [
        ("bsp", "when:pull=progress < v_train,step=round"),
        ("asp", "when:pull=true"),
        ("ssp:s=2,cache=off", "when:pull=progress < v_train + 2"),
        ("dsps:min=1,max=8,cache=off", "when:pull=gap < 1 + floor(7 * imbalance + 0.5)"),
        ("drop:n=3", "when:pull=progress < v_train,push=count >= 3,step=round"),
        ("drop:n=2,late=apply", "when:pull=progress < v_train,push=count >= 2,step=round,late=apply"),
        ("pssp:s=1,c=0.5,cache=off", "when:pull=gap < 1 || rand() >= 0.5"),
        ("pssp:s=1,alpha=0.8,cache=off", "when:pull=gap < 1 || rand() >= 0.8 / (1 + exp(1 - gap))"),
        (
            "pssp:s=1,alpha=significance,cache=off",
            "when:pull=gap < 1 || rand() >= significance / (1 + exp(1 - gap))",
        ),
    ] {
        for order in ["ranked", "arrival"] {
            let trained = |sync: &str| {
                let text = "seed = 5\nworkers = 4\nservers = 2\ncores = 2\niterations = 40\nchunk = '32B'\n\
                     [compute]\nstep_ms = 10.0\njitter = 0.5\nstraggle_p = 0.1\nstraggle_factor = 4.0\n\
                     [[tables]]\nname = 'w'\nshape = [100]\n[[tables]]\nname = 'rows'\nshape = [40, 3]\nrows = true\n";
                let scenario = Scenario::parse(text).unwrap().with(Axis::Sync, sync).with(Axis::Order, order);
                let report = run_scenario(&scenario).unwrap();
                assert!(report.finished, "{sync}: {:?}", report.stalled);
                // Under bsp chunks are answered as soon as they are complete, which takes another time.
                (report.tables, SyncStats { waited_ns: 0, ..report.sync })
            };
            assert_eq!(trained(model), trained(expression), "{model} and {expression}, {order}");
        }
    }
}
