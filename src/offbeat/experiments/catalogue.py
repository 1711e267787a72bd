"""The experiments: each a paper's claim, and the scene that it is tried in here. Nothing but data.

Step times and delays are the papers' own wherever they are known; virtual time is free. What is smaller is the model.
A P100 takes 219 images a second with ResNet-50 and 154 with VGG-16 (TensorFlow's published benchmarks); their messages
are of 25.6M and 138.4M float32 numbers.
"""

from __future__ import annotations

from offbeat.delays import chronic, exponential, lognormal, random, rotating, stalls, total
from offbeat.experiments.experiment import ALL_IN_ONE, Case, Claim, Experiment, Measure, Size
from offbeat.experiments.navigation import LEARNS, Turns
from offbeat.experiments.workloads import (
    DIGITS,
    FASHION,
    NAVIGATION,
    PLAIN_DIGITS,
    PLAIN_FASHION,
    PROVERBS,
    TRANSLATION,
    VOWELS,
    hyperplane,
)
from offbeat.sim import Network

TO_LOSS: Measure = "speed-up to the same training loss"
TO_SCORE: Measure = "time to the best score"
FAST, FASTER, SLOW = (Network(5e-5, rate, "halving_doubling") for rate in (1.25e9, 1.25e10, 1.25e8))
RESNET_BYTES, RESNET_32_S, RESNET_128_S = 4 * 25.6e6, 32 / 219, 128 / 219
VGG_BYTES, VGG_32_S = 4 * 138.4e6, 32 / 154

SYNCHRONOUS = {"synchronous": "allreduce"}
EAGER = {
    "eager, solo": "eager:wait=first,catch_up=every_step,grace=0",
    "eager, majority": "eager:wait=majority,catch_up=every_step,grace=0",
    "eager, half": "eager:wait=0.5,sync=bounded,staleness=20",
}
SELF = {ALL_IN_ONE: ALL_IN_ONE}


def all_in_one(rivals: dict[str, str], among: str = "", learning: bool = True) -> Claim:
    """At or before the best of the others, with its defaults."""
    measure: Measure = TO_LOSS if learning else "speed-up"
    return Claim("–", measure, (ALL_IN_ONE,), tuple(rivals), at_least=1.0, among=among, learning=learning)


EAGER_HYPERPLANE = Experiment(
    "eager-hyperplane",
    ("eager",),
    "1.5 to 2 times as fast as synchronous SGD with the same loss, one of 8 workers late by 200, 300 or 400 ms",
    "The paper's 8 workers and delays. Its step is taken to last 300 ms, with which the speed-ups that it reports "
    "(1.50, 1.75 and 2.01, from memory) are those of never waiting. Its hyperplane has 8,192 weights.",
    SYNCHRONOUS | EAGER | SELF,
    tuple(
        Case(
            f"one of 8 late by {ms} ms",
            8,
            0.3,
            delays=random(1, ms / 1000),
            injected=f"another worker each step is {ms} ms late, of a step of 300 ms",
            quick=ms == 300,
        )
        for ms in (200, 300, 400)
    ),
    (
        Claim("1.50", "speed-up", tuple(EAGER), ("synchronous",), at_least=1.5, among="200 ms"),
        Claim("1.75", "speed-up", tuple(EAGER), ("synchronous",), at_least=1.5, among="300 ms"),
        Claim("2.01", "speed-up", tuple(EAGER), ("synchronous",), at_least=1.5, among="400 ms"),
        Claim("equal", "loss", tuple(EAGER), ("synchronous",), at_most=1.0),
        all_in_one(SYNCHRONOUS | EAGER),
    ),
    Size(192, 3, hyperplane(512, (0.05, 0.1, 0.2)), batch=32),
    Size(64, 2, hyperplane(64, (0.05, 0.1, 0.2)), batch=16),
)

EAGER_IMAGES = Experiment(
    "eager-images",
    ("eager",),
    "1.29 times as fast as synchronous SGD on ImageNet, no accuracy lost",
    "ResNet-50's step of 128 images (584 ms) and, for the severe skew, a step of 100 ms (assumed). One of 8 workers is "
    "late where the paper has 4 of 64: in both somebody is late in every step. A small CNN stands for the ResNets.",
    SYNCHRONOUS | EAGER | SELF,
    (
        Case(
            "one of 8 late by 460 ms",
            8,
            RESNET_128_S,
            delays=random(1, 0.46),
            injected="another worker each step is 460 ms late, of a step of 584 ms",
        ),
        Case(
            "all of 8 late by 50 to 400 ms",
            8,
            0.1,
            delays=rotating(0.05, 0.4),
            injected="all are late, by 50 to 400 ms, shifted by one worker each step, of a step of 100 ms",
            quick=False,
        ),
    ),
    (
        Claim("1.29", "speed-up", tuple(EAGER), ("synchronous",), at_least=1.5),
        Claim("none", "points lost", tuple(EAGER), ("synchronous",), at_most=0.5),
        all_in_one(SYNCHRONOUS | EAGER),
    ),
    Size(120, 3, FASHION, batch=32),
    Size(60, 2, DIGITS),
)

# Of UCF101's clips (at 10 of 25 frames a second): mean 72.7 frames, sd 37.6, median 65, p5 29, p95 140. A log-normal of
# this median and spread has a mean of 72.9, sd 37.1, p5 29.5, p95 143.
FRAME_S, FRAMES, FRAMES_SIGMA = 0.017, 65.0, 0.48
EAGER_VIDEO = Experiment(
    "eager-video",
    ("eager",),
    "1.27 times as fast as synchronous SGD, an LSTM on the videos of UCF101, whose lengths alone make the imbalance",
    "What is learned are vowels (JapaneseVowels, 270 utterances of 7 to 29 frames to train on), told by an LSTM; a "
    "step takes 17 ms for each frame of its longest. And lengths only: step times go by the frame counts of UCF101's "
    "clips (at 10 of 25 frames a second), which are drawn from a log-normal of their median and spread.",
    SYNCHRONOUS | EAGER | SELF,
    (
        Case("8 workers, vowels", 8, FRAME_S * 17.2, uneven="lengths of utterances", by_content=True),
        Case(
            "8 workers, UCF101's lengths only",
            8,
            FRAME_S * 72.7,
            compute_s=lognormal(FRAME_S * FRAMES, FRAMES_SIGMA),
            uneven="lengths of videos",
            learns=False,
        ),
    ),
    (
        Claim("1.27", "speed-up", tuple(EAGER), ("synchronous",), at_least=1.27),
        Claim("none", "points lost", tuple(EAGER), ("synchronous",), at_most=0.5),
        Claim("1.27", "speed-up", tuple(EAGER), ("synchronous",), at_least=1.27, learning=False),
        all_in_one(SYNCHRONOUS | EAGER),
        all_in_one(SYNCHRONOUS | EAGER, learning=False),
    ),
    Size(80, 3, VOWELS, timed_steps=1000, timed_seeds=5, points=20),
    Size(40, 2, VOWELS, timed_steps=200, timed_seeds=2),
)

WAGMA_RIVALS = SYNCHRONOUS | {
    "local SGD 10": "local_sgd:period=10",
    "D-PSGD": "dpsgd",
    "SGP": "sgp",
    "AD-PSGD": "ad_psgd",
}
WAGMA = {"WAGMA": "wagma:catch_up=every_step", "WAGMA, global rounds": "wagma:merge=correct"}
WAGMA_IMAGES = Experiment(
    "wagma-images",
    ("wagma",),
    "the accuracy of all-reduce on ImageNet, faster than it and than gossip",
    "ResNet-50's step of 128 images (584 ms). Each of 4 and of 8 workers is late by the paper's 320 ms in one step of "
    "32, as 2 of its 64 are each step; 32 of 1,024 in a simulation of time alone. A small CNN stands for ResNet-50.",
    WAGMA_RIVALS | WAGMA | SELF,
    (
        *(
            Case(
                f"{workers} workers",
                workers,
                RESNET_128_S,
                delays=stalls(1 / 32, 0.32),
                injected="each worker is 320 ms late in one step of 32, of a step of 584 ms",
                network=FAST,
                message_bytes=RESNET_BYTES,
                quick=workers == 4,
            )
            for workers in (4, 8)
        ),
        Case(
            "1,024 workers, time alone",
            1024,
            RESNET_128_S,
            delays=random(32, 0.32),
            injected="32 others each step are 320 ms late, of a step of 584 ms",
            network=FASTER,
            message_bytes=RESNET_BYTES,
            learns=False,
            quick=False,
        ),
    ),
    (
        Claim("as all-reduce", "points lost", tuple(WAGMA), ("synchronous",), at_most=0.5),
        Claim("faster", "speed-up", tuple(WAGMA), ("synchronous",), at_least=1.0),
        Claim("faster", "speed-up", tuple(WAGMA), ("synchronous",), at_least=1.0, learning=False),
        all_in_one(WAGMA_RIVALS | WAGMA),
    ),
    Size(120, 3, FASHION, batch=32, timed_steps=40),
    Size(60, 2, DIGITS),
)

TRANSFORMER_BYTES = 4 * 61e6
WAGMA_TRANSLATION = Experiment(
    "wagma-translation",
    ("wagma",),
    "the highest score in the shortest time of all, a Transformer that translates, sentences of uneven lengths",
    "English and Spanish verses, each worker's batch of such that are about as long: a step takes as long as its "
    "words are many, 400 ms on average (assumed), with messages of the paper's 61 million numbers at 100 Gbit/s. A "
    "Transformer of two layers of width 64, with two thousand words of each language, and batches of 4 verses: many "
    "small steps teach it more than few large ones. Accuracy: how many words are right, each after the right ones "
    "before it. BLEU: of 256 verses that are held out, by greedy decoding; a word that the vocabulary has not is never "
    "right.",
    WAGMA_RIVALS | WAGMA | SELF,
    (
        Case(
            "8 workers",
            8,
            0.4,
            uneven="lengths of verses",
            by_content=True,
            network=FASTER,
            message_bytes=TRANSFORMER_BYTES,
        ),
    ),
    (
        Claim("the highest", "points lost", tuple(WAGMA), tuple(WAGMA_RIVALS), at_most=0.0),
        Claim("the highest", "score lost", tuple(WAGMA), tuple(WAGMA_RIVALS), at_most=0.0),
        Claim("the shortest", TO_SCORE, tuple(WAGMA), tuple(WAGMA_RIVALS), at_most=0.8),
        Claim("–", TO_SCORE, (ALL_IN_ONE,), tuple(WAGMA_RIVALS | WAGMA), at_most=1.0),
    ),
    Size(800, 3, TRANSLATION, batch=4, points=30),
    Size(16, 1, PROVERBS, batch=4, points=2),
)

DECENTRALISED = ("local SGD 10", "D-PSGD", "SGP")
RL_RIVALS = {label: WAGMA_RIVALS[label] for label in ("synchronous", *DECENTRALISED)}
RL_WAGMA = {
    "WAGMA": WAGMA["WAGMA"],
    "WAGMA, bounded": "wagma:wait=0.5,sync=bounded,staleness=20",
    "WAGMA, never all": "wagma:tau=none,merge=correct",
}
WAGMA_RL = Experiment(
    "wagma-rl",
    ("wagma",),
    "2.1 times the throughput of decentralised rivals on 1,024 GPUs, PPO that finds its way through Habitat",
    f"PPO on MiniGrid: a worker's turn is to play whole episodes in a world of its own kind, and {LEARNS} steps of "
    "learning from them. Turns take as long as they were measured to take, in CPU time, in FourRooms, MultiRoom-N6, "
    "KeyCorridorS3R3, Dynamic-Obstacles-8x8 and BabyAI's GoTo, a fifth of the workers in each: who has a slow world is "
    "slow for good. What is learned, by 4 workers at the pace of the first four, are smaller worlds, which want but "
    "walking, episodes of up to 60 steps, in equal time. As workers in short worlds take more turns where nobody "
    "waits, throughput is counted in computing, not in turns.",
    RL_RIVALS | RL_WAGMA | SELF,
    (
        Case(
            "4 workers",
            4,
            0.5 / LEARNS,
            compute_s=Turns(),
            uneven="lengths of episodes, measured",
            network=FASTER,
            ends="time",
        ),
        Case(
            "1,024 workers, time alone",
            1024,
            0.5 / LEARNS,
            compute_s=Turns(),
            uneven="lengths of episodes, measured",
            network=FASTER,
            learns=False,
            ends="time",
            quick=False,
        ),
    ),
    (
        Claim("2.1", "work", tuple(RL_WAGMA), DECENTRALISED, at_least=2.1, learning=False),
        Claim("as synchronous", "score lost", tuple(RL_WAGMA), ("synchronous",), at_most=0.02),
        Claim("–", TO_SCORE, (ALL_IN_ONE,), tuple(RL_RIVALS | RL_WAGMA), at_most=1.0),
        Claim("–", "work", (ALL_IN_ONE,), tuple(RL_RIVALS | RL_WAGMA), at_least=1.0, learning=False),
    ),
    Size(320, 5, NAVIGATION, batch=8, timed_steps=80, points=10),
    Size(8, 1, NAVIGATION, batch=1, points=1),
)

LOCAL = {"local SGD 4": "local_sgd:period=4"}
OVERLAPPING = {
    "DaSGD 4/1": "dasgd:period=4,delay=1",
    "DaSGD 4/2": "dasgd:period=4,delay=2",
    "DaSGD 16/12 correct": "dasgd:period=16,delay=12,merge=correct",
}
_MANY = (8, 128, 1024)
DASGD_OVERLAP = Experiment(
    "dasgd-overlap",
    ("dasgd",),
    "hides all communication behind computing, so that speed grows with the number of workers; accuracy as SGD",
    "ResNet-50's messages and its step of 32 images (146 ms), at 10 and 1 Gbit/s; time alone, steps alike as in the "
    "paper's model of performance. The delay is the least that lasts as long as the average: 2 steps, and 12. What is "
    "learned is tried with 8 workers and a small CNN, whose one bucket all-reduce cannot overlap.",
    SYNCHRONOUS | LOCAL | OVERLAPPING | SELF,
    (
        Case("8 workers at 10 Gbit/s", 8, RESNET_32_S, network=FAST, message_bytes=RESNET_BYTES),
        *(
            Case(
                f"{workers:,} workers at {rate} Gbit/s, time alone",
                workers,
                RESNET_32_S,
                network=network,
                message_bytes=RESNET_BYTES,
                learns=False,
                quick=workers < 1024,
            )
            for rate, network in ((10, FAST), (1, SLOW))
            for workers in _MANY
        ),
    ),
    (
        Claim("as SGD", "points lost", tuple(OVERLAPPING), ("synchronous",), at_most=0.5),
        Claim("all hidden", "efficiency", ("DaSGD 4/2",), at_least=0.98, among="at 10 Gbit/s", learning=False),
        Claim("all hidden", "efficiency", ("DaSGD 16/12 correct",), at_least=0.98, among="at 1 Gbit/s", learning=False),
        all_in_one(SYNCHRONOUS | LOCAL | OVERLAPPING),
    ),
    Size(100, 3, FASHION, batch=32, timed_steps=48),
    Size(60, 2, DIGITS, timed_steps=32),
)

FULL = {"full communication": "allreduce"}
CONSTANT = {"CPSGD 4": "local_sgd:period=4", "CPSGD 8": "local_sgd:period=8"}
QSGD, ADAPTIVE = {"QSGD, 8 bits": "qsgd:bits=8"}, {"ADPSGD": "adaptive"}
ADAPTIVE_PERIOD = Experiment(
    "adaptive-period",
    ("adaptive", "qsgd"),
    "lower loss and higher accuracy than constant periods with less communication; half of QSGD's bytes; 1.14 to 1.27 "
    "times as fast as full communication at 100 Gbit/s, 1.46 to 1.95 at 10",
    "8 workers for the paper's 16. Computing against bytes is as with VGG-16 on P100s: 208 ms for 32 images, messages "
    "of 554 MB. A small CNN stands for VGG-16; it is one bucket, so that full communication is not overlapped with the "
    "backward pass, as DDP does it with a large model. Whether the paper's was is not known.",
    FULL | QSGD | CONSTANT | ADAPTIVE | SELF,
    tuple(
        Case(f"VGG-16 at {rate} Gbit/s", 8, VGG_32_S, network=network, message_bytes=VGG_BYTES)
        for rate, network in ((100, FASTER), (10, FAST))
    ),
    (
        Claim("lower", "training loss", tuple(ADAPTIVE), ("CPSGD 8",), at_most=1.0, among="at 100"),
        Claim("higher", "points lost", tuple(ADAPTIVE), ("CPSGD 8",), at_most=0.0, among="at 100"),
        Claim("less", "bytes", tuple(ADAPTIVE), ("CPSGD 8",), at_most=1.0, among="at 100"),
        Claim("half", "bytes", tuple(ADAPTIVE), tuple(QSGD), at_most=0.5, among="at 100"),
        *(
            Claim(paper, "speed-up", tuple(ADAPTIVE), tuple(FULL), at_least=goal, among=among)
            for paper, goal, among in (("1.14 to 1.27", 1.14, "at 100"), ("1.46 to 1.95", 1.46, "at 10 "))
        ),
        all_in_one(FULL | QSGD | CONSTANT | ADAPTIVE),
    ),
    Size(100, 3, FASHION, batch=32),
    Size(60, 2, DIGITS),
)

BLOCKING = {"all-reduce": "allreduce", "D-PSGD": "dpsgd:order=atc", "MATCHA": "matcha"}
PIECES = {
    "non-blocking all-reduce": "nonblocking:micro=8",
    "non-blocking D-PSGD": "nonblocking:micro=8,over=ring",
    "non-blocking MATCHA": "nonblocking:micro=8,over=matcha",
}
NONBLOCKING = Experiment(
    "nonblocking",
    ("nonblocking", "dpsgd", "matcha"),
    "up to 2 times less time to the same training loss, over all-reduce, D-PSGD and MATCHA, on uneven workers",
    "8 workers and batches of 32 in 8 pieces, steps of 100 ms; equal time for all, by the end of which each worker "
    "could have taken so many steps if it were never late. A small CNN stands for ResNet-50.",
    BLOCKING | PIECES | SELF,
    tuple(
        Case(name, 8, 0.1, compute_s=compute_s, injected=injected, ends="time", quick=name == "one worker 4× slower")
        for name, compute_s, injected in (
            (
                "one worker 4× slower",
                total(0.1, chronic(7, 0.3)),
                "one of 8 workers takes 400 ms a step, the others 100",
            ),
            ("random delays", total(0.1, exponential(0.1)), "exponential delays with a mean of 100 ms, in all steps"),
        )
    ),
    (
        *(
            Claim("up to 2", TO_LOSS, (ours,), (rival,), at_least=2.0)
            for ours, rival in zip(PIECES, BLOCKING, strict=True)
        ),
        all_in_one(BLOCKING | PIECES),
    ),
    Size(80, 3, PLAIN_FASHION, batch=32),
    Size(40, 2, PLAIN_DIGITS, batch=32),
)

EXPERIMENTS = {
    made.name: made
    for made in (
        EAGER_HYPERPLANE, EAGER_IMAGES, EAGER_VIDEO, WAGMA_TRANSLATION, WAGMA_RL, WAGMA_IMAGES, DASGD_OVERLAP,
        ADAPTIVE_PERIOD, NONBLOCKING,
    )
}  # fmt: skip
