"""Word lists of the built-in haystack's grammar (see prose.py): written for this project, without digits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ADVERBS",
    "CONDITIONS",
    "LINKS",
    "PEOPLE",
    "PLACES",
    "REASONS",
    "RESULTS",
    "SUBJECTS",
    "TIMES",
    "VIEWS",
    "Subject",
]


@dataclass(frozen=True)
class Subject:
    """One subject of paragraphs: its name, who works in it, what they do, with what, and by which virtues."""

    field: str
    worker: str
    deeds: tuple[str, ...]
    things: tuple[str, ...]
    virtues: tuple[str, ...]


def _subject(field: str, worker: str, deeds: str, things: str, virtues: str) -> Subject:
    lists = [tuple(part.strip() for part in text.split(";")) for text in (deeds, things, virtues)]
    return Subject(field, worker, *lists)


SUBJECTS: tuple[Subject, ...] = (
    _subject(
        "baking",
        "the baker",
        "lights the oven; weighs the flour; folds the dough; tastes the crust; sweeps the bench; feeds the old leaven",
        "rye flour; a warm oven; sea salt; the second loaf; a wooden bowl; cold water",
        "patience; a steady hand; an early start; good timing",
    ),
    _subject(
        "river trade",
        "the boatman",
        "loads the barge; reads the current; mends the ropes; counts the barrels; waits for the lock; greets the pilot",
        "the towpath; a dry hold; the spring flood; a long rope; the toll house; a shallow bend",
        "calm; local knowledge; trust between strangers; a strong back",
    ),
    _subject(
        "clockmaking",
        "the clockmaker",
        "files the gears; oils the springs; listens to the escapement; polishes the case; winds the movement; "
        "adjusts the pendulum",
        "a worn spring; the brass wheel; a true pendulum; fine oil; the striking train; a cracked dial",
        "precision; good light; quiet; respect for earlier hands",
    ),
    _subject(
        "gardening",
        "the gardener",
        "turns the soil; prunes the pear trees; waters the seedlings; saves the seeds; ties up the beans; "
        "covers the beds with straw",
        "dark soil; the south wall; a sharp spade; autumn leaves; the rain barrel; young lettuce",
        "observation; restraint; regular work; an eye for weather",
    ),
    _subject(
        "bridge building",
        "the engineer",
        "measures the span; tests the steel; draws the arches; walks the scaffold; checks the bolts; studies the wind",
        "a firm foundation; the middle pier; wet concrete; the old drawings; a loose rivet; the river bed",
        "caution; plain arithmetic; honest reports; wide margins",
    ),
    _subject(
        "music teaching",
        "the teacher",
        "tunes the piano; counts the bars aloud; repeats the hard passage; corrects the bowing; copies the parts; "
        "listens to the choir",
        "a slow scale; the second violin; clean rhythm; an old songbook; the last rehearsal; a quiet room",
        "good humour; a careful ear; daily practice; courage",
    ),
    _subject(
        "weather watching",
        "the observer",
        "reads the barometer; sketches the clouds; empties the rain gauge; notes the wind; compares the records; "
        "telephones the harbour",
        "morning fog; the west wind; a falling glass; the first frost; a ring around the moon; dry thunder",
        "regularity; doubt; long memory; neat handwriting",
    ),
    _subject(
        "library work",
        "the librarian",
        "sorts the returned books; repairs the bindings; answers the letters; dusts the upper shelves; "
        "writes the catalogue cards; opens the reading room",
        "the lending desk; a missing volume; the map drawer; soft light; a torn page; the quiet corner",
        "order; discretion; curiosity; kindness to beginners",
    ),
    _subject(
        "railway work",
        "the signalman",
        "sets the points; logs the night train; polishes the levers; trims the lamp; calls the next box; "
        "inspects the crossing",
        "the branch line; a late train; the signal lamp; a heavy coupling; the station clock; frozen points",
        "attention; clear speech; strict habit; wakefulness",
    ),
    _subject(
        "beekeeping",
        "the beekeeper",
        "opens the hive; smokes the entrance; moves the frames; looks for the queen; strains the honey; "
        "paints the boxes",
        "clover honey; a weak colony; the early willow; clean wax; a full frame; the winter store",
        "slow movement; gentleness; attention to small signs; thrift",
    ),
    _subject(
        "pottery",
        "the potter",
        "wedges the clay; throws the bowls; mixes the glaze; stacks the kiln; trims the feet; lets the fire die",
        "red clay; an even wall; the ash glaze; a cracked jug; the kick wheel; dry wood",
        "touch; acceptance of loss; repetition; a sense of proportion",
    ),
    _subject(
        "mapmaking",
        "the surveyor",
        "climbs the ridge; sets up the tripod; reads the angles; inks the coastline; names the streams; "
        "walks the boundary",
        "a clear horizon; the base line; a doubtful path; contour lines; the village well; a brass compass",
        "exactness; endurance; fairness; a good pair of boots",
    ),
    _subject(
        "keeping a lighthouse",
        "the keeper",
        "cleans the lens; climbs the stairs; winds the mechanism; writes the log; watches the shipping; "
        "hauls up the stores",
        "the great lamp; a winter gale; the supply boat; spare wicks; the gallery rail; heavy swell",
        "solitude; reliability; routine; cheerfulness",
    ),
    _subject(
        "cheesemaking",
        "the dairy woman",
        "warms the milk; cuts the curd; turns the wheels; salts the rind; scrubs the vats; tastes the oldest cheese",
        "evening milk; the cool cellar; a firm rind; fresh curd; linen cloth; the alpine pasture",
        "cleanliness; patience; a good nose; steady warmth",
    ),
    _subject(
        "papermaking",
        "the papermaker",
        "beats the fibres; dips the mould; presses the sheets; hangs the paper to dry; sorts out the flawed sheets; "
        "cleans the felts",
        "linen rags; clear spring water; a heavy press; the drying loft; a rough edge; the watermark",
        "rhythm; cold hands; evenness; economy",
    ),
    _subject(
        "running a market stall",
        "the stallholder",
        "arranges the apples; calls out the prices; weighs the cherries; gives back the change; folds the awning; "
        "bargains with the growers",
        "ripe plums; a regular customer; the corner pitch; a fair scale; brown paper; the early shoppers",
        "honesty; a loud voice; a memory for faces; good shoes",
    ),
    _subject(
        "mountain guiding",
        "the guide",
        "checks the ropes; studies the snow; sets a slow pace; turns the party back; marks the route; boils the tea",
        "the upper hut; soft snow; a narrow ledge; the north face; a dry pair of gloves; the weather report",
        "prudence; calm speech; strength in reserve; humility",
    ),
    _subject(
        "village medicine",
        "the doctor",
        "visits the farms; listens to the lungs; writes the prescriptions; washes the instruments; asks about the "
        "children; sits with the old",
        "a clean bandage; the long night call; simple food; the waiting room; a stubborn fever; fresh air",
        "listening; plain words; tact; firm judgement",
    ),
    _subject(
        "shipbuilding",
        "the shipwright",
        "shapes the ribs; bends the planks; drives the nails; caulks the seams; tars the hull; steps the mast",
        "seasoned oak; the steam box; a straight keel; the slipway; old drawings; a tight seam",
        "foresight; strength; good eyesight; pride in unseen work",
    ),
    _subject(
        "printing",
        "the printer",
        "sets the type; inks the rollers; pulls a proof; corrects the margins; cleans the press; cuts the paper",
        "black ink; a broken letter; the morning edition; fresh proofs; the type case; a straight margin",
        "accuracy; speed; taste; respect for the reader",
    ),
)

TIMES: tuple[str, ...] = (
    "before sunrise",
    "on market days",
    "late in the autumn",
    "during the long winters",
    "in the years after the flood",
    "when the first visitors arrive",
    "after a week of rain",
    "on quiet Sunday afternoons",
    "in early spring",
    "towards the end of the season",
    "once the harvest is in",
    "at the turn of the year",
    "in the hottest weeks of summer",
    "just after the evening bell",
)

PLACES: tuple[str, ...] = (
    "in the old harbour",
    "behind the town hall",
    "at the edge of the forest",
    "on the far side of the valley",
    "near the railway station",
    "in a small town by the coast",
    "above the river",
    "in the northern villages",
    "on the road to the mill",
    "between the two hills",
    "in the narrow streets of the old quarter",
    "across the border",
    "along the canal",
    "down by the ferry landing",
)

PEOPLE: tuple[str, ...] = (
    "my neighbour",
    "a retired schoolmaster",
    "the youngest apprentice",
    "an old friend of the family",
    "the innkeeper",
    "a traveller from the south",
    "the mayor",
    "a careful reader",
    "the widow next door",
    "a visiting student",
    "the postman",
    "an experienced hand",
    "the owner of the yard",
    "a cousin from the city",
)

REASONS: tuple[str, ...] = (
    "because the days are short",
    "since nobody else will do it",
    "as the custom demands",
    "because a mistake here costs a whole season",
    "for there is seldom a second chance",
    "since the weather cannot be trusted",
    "because the work teaches itself to those who stay",
    "as everyone in the district knows",
    "because haste has ruined better plans",
    "since money was never the point",
    "for the neighbours are watching",
    "because that is how it was shown to them",
    "as the tools are older than the house",
    "since small things decide large ones",
)

RESULTS: tuple[str, ...] = (
    "the day goes better than expected",
    "nobody speaks of it again",
    "the whole street comes to look",
    "the accounts balance in the end",
    "the younger ones begin to understand",
    "a good deal of work is saved",
    "the old quarrel is forgotten",
    "the evening ends in laughter",
    "something useful is learned",
    "the same question returns the following year",
    "people are willing to wait",
    "the results speak for themselves",
)

CONDITIONS: tuple[str, ...] = (
    "when the wind drops",
    "if the light is good",
    "as long as the roads are open",
    "even in poor years",
    "when strangers are present",
    "if there is time to spare",
    "whenever the price rises",
    "unless the frost comes early",
    "when the house is empty",
    "if nothing has been broken",
    "while the others are still asleep",
    "as soon as the rain stops",
)

VIEWS: tuple[str, ...] = (
    "in the opinion of most people here",
    "as far as anyone can tell",
    "to judge by the letters that survive",
    "if one may believe the older books",
    "from the point of view of a beginner",
    "seen from a distance",
    "when all is said and done",
    "according to the parish records",
    "by the common rule",
    "in the experience of the valley",
)

ADVERBS: tuple[str, ...] = (
    "slowly",
    "carefully",
    "usually",
    "always",
    "patiently",
    "quietly",
    "rarely",
    "often",
    "gladly",
    "calmly",
)

LINKS: tuple[str, ...] = (
    "of course",
    "even so",
    "in the same way",
    "for all that",
    "now and then",
    "as a rule",
    "on the other hand",
    "in return",
    "strangely enough",
    "after all",
)
