"""Nights until a leak is listed, by the night on which it begins, and false visits: drawn scores, this evidence and that of version 1.

Protocol, written before the first run of the record:

1. A network has 8, 16 or 50 sensors and 60 nights, one score a night and a sensor. Logits of normal nights: a mean of each sensor, normal(-1.5, 0.7);
   a standard deviation of each sensor, lognormal around 0.4 with 0.3; nights are independent. One network in each cell has its own seed; seeds from
   10,000 on had no part in any choice of a constant.
2. Leaks begin on night 1, 3, 6, 10 or 20 at one sensor of each network. A model that separates them well: the logit rises by 6 standard deviations of
   the nights of that sensor, and by 3.5 more at a leak from night 1, which has no quiet night (then above all other sensors). One that does not: by 1.5.
3. Budgets 0.2 (the default) and 1.0 false visits per 100 sensor-nights. A sensor is visited on the night on which it is listed; its evidence starts again
   after a visit without a leak. No detector with an evaluation: places without a leak of other networks take no part.
4. Measured: nights from the first night of the leak to the list (1: the first night), the share listed within 20 nights, and the false visits per 100 normal
   sensor-nights with a 95 % interval over networks (bootstrap), for 100 networks in each cell.
5. Normal nights of other kinds, 100 networks of 50 sensors without leaks: heavy tails (t with 4 degrees of freedom), taps (one night in 20 higher by 3
   standard deviations), skew (exponential), seasons (a sine of one standard deviation and 365 nights, common to all sensors).
6. Right if, for each kind of nights and each cell, the interval of the realised rate lies under the budget or contains it, and if a leak that the model separates
   well and that begins on night 3 or later is listed within 20 nights in at least 95 % of the networks at the default budget, and within the stated number of
   nights (`nights.nights_to_list`) plus 3 in at least 80 %.
"""
