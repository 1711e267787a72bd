"""Every method with settings that differ, also those whose result is a matter of time: all that is replayed."""

from __future__ import annotations

import offbeat as ob

IN_NODES = {"eager, in nodes", "wagma, in nodes"}
IN_SMALL_BUCKETS = "coded in small buckets"  # which several workers own; a record holds a codec by its name alone
TIMED: dict[str, ob.Strategy] = {
    "eager": ob.eager(),
    "eager, majority": ob.eager("majority", sync_every=5),
    "eager, quorum and bound": ob.eager(0.5, sync="bounded", staleness=3),
    "eager, late": ob.eager(late=1),
    "eager, late and bounded": ob.eager(late=1, sync="bounded", staleness=4),
    "eager, drop": ob.eager(stale="drop"),
    "eager, fade": ob.eager(stale="fade"),
    "eager, latest": ob.eager(apply="latest"),
    "eager, every step": ob.eager(catch_up="every_step"),
    "eager, everyone": ob.eager("everyone"),
    "eager, coded": ob.eager(codec=ob.codec.qsgd(8)),
    "eager, coded in small buckets": ob.eager(codec=ob.codec.int8(bucket=7)),
    "eager, in nodes": ob.eager(per_node=2),
    "wagma": ob.wagma(),
    "wagma, tau 3": ob.wagma(tau=3),
    "wagma, correct": ob.wagma(merge="correct"),
    "wagma, late": ob.wagma(late=1),
    "wagma, every step": ob.wagma(catch_up="every_step"),
    "wagma, bounded": ob.wagma(sync="bounded", staleness=3),
    "wagma, coded": ob.wagma(codec=ob.codec.qsgd(8)),
    "wagma, correct and coded in small buckets": ob.wagma(merge="correct", codec=ob.codec.int8(bucket=7)),
    "wagma, in nodes": ob.wagma(per_node=2),
    "ad_psgd": ob.ad_psgd(),
    "ad_psgd, ring": ob.ad_psgd("ring"),
    "nonblocking": ob.nonblocking(4),
    "nonblocking, auto": ob.nonblocking("auto", stop="auto"),
    "nonblocking, server": ob.nonblocking(4, over="server"),
    "nonblocking, ring": ob.nonblocking(4, over="ring"),
    "nonblocking, matcha": ob.nonblocking(4, over="matcha"),
    "nonblocking, coded": ob.nonblocking(4, codec=ob.codec.qsgd(8)),
    "allreduce": ob.allreduce(),
    "qsgd": ob.qsgd(),
    "sgp": ob.sgp(),
    "dpsgd": ob.dpsgd(),
    "matcha": ob.matcha(),
    "noloco": ob.noloco(3),
    "local_sgd": ob.local_sgd(3),
    "adaptive": ob.adaptive(2, sampling=4),
    "dasgd": ob.dasgd(3, delay=2),
    "diloco": ob.diloco(4, fragments=2, overlap=1),
    "sparseloco": ob.sparseloco(3, codec=ob.codec.topk(8)),
}
