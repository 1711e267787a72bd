"""The methods, one line each, in the order of the tables. A line here is all that registers one."""

# isort: off
from offbeat.strategies.self_clocked import self_clocked as self_clocked
from offbeat.strategies.allreduce import allreduce as allreduce
from offbeat.strategies.qsgd import qsgd as qsgd
from offbeat.strategies.local_sgd import local_sgd as local_sgd
from offbeat.strategies.adaptive import adaptive as adaptive
from offbeat.strategies.dasgd import dasgd as dasgd
from offbeat.strategies.eager import eager as eager
from offbeat.strategies.msync import msync as msync
from offbeat.strategies.ringmaster import ringmaster as ringmaster
from offbeat.strategies.wagma import wagma as wagma
from offbeat.strategies.nonblocking import nonblocking as nonblocking
from offbeat.strategies.dpsgd import dpsgd as dpsgd
from offbeat.strategies.ad_psgd import ad_psgd as ad_psgd
from offbeat.strategies.sgp import sgp as sgp
from offbeat.strategies.matcha import matcha as matcha
from offbeat.strategies.diloco import diloco as diloco
from offbeat.strategies.decoupled import decoupled as decoupled
from offbeat.strategies.sparseloco import sparseloco as sparseloco
from offbeat.strategies.noloco import noloco as noloco
