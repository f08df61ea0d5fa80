"""Prose of our own, some 1,800 tokens: to fill caches with what models usually read."""

PASSAGES = [
    """The harbour of the old town lies between two hills, and every morning the boats come in before the sun is over
the eastern one. The first to arrive are the small ones that stay near the coast: they bring crabs, mussels and the
flat fish that live on the sand. An hour later the larger boats follow, with ice in their holds, and the market on the
quay grows loud. People from the upper town walk down the long stairs with baskets and bags, and they know exactly
which of the sellers cuts the fish well and which of them talks too much. By nine the best is gone, by ten the gulls
have taken the rest, and at eleven a man with a hose washes the stones until nothing is left but the smell.""",
    """A river does not run straight for long, even on flat ground. Wherever the current is a little faster, it takes
some soil from the bank, and wherever it is slower, it lets some of it fall. So a small bend grows into a large one,
the outside of the curve is cut deeper year after year, and the inside is filled with sand and gravel. After a few
hundred years the neck of the loop is so narrow that a single flood breaks through it. The river has found a shorter
way, and the old loop becomes a still lake in the shape of a horseshoe, in which reeds grow and herons stand. Those who
look at the valley from above can read its history: pale curves in the fields show where the water went before there
were any maps, and rows of willows follow a bank that has not been a bank for three generations.""",
    """To bake a simple loaf you need flour, water, salt and yeast, and more patience than skill. Mix five hundred
grams of flour with three hundred and fifty grams of lukewarm water, ten grams of salt and five grams of fresh yeast.
Work the dough with your hands for ten minutes, until it no longer sticks to the table and springs back when you press
it with a finger. Put it in a bowl, cover it with a damp cloth, and leave it in a warm corner for an hour and a half.
Then fold it a few times, shape it into a ball, and let it rest again while the oven heats up. A pan of hot water on
the lowest shelf gives the steam that makes the crust thin and crisp. After forty minutes, knock on the bottom of the
loaf: if it sounds hollow, it is done. The hardest part is to wait until it has cooled before you cut the first
slice.""",
    """Long before there were clocks on towers, people measured the hours with water. A bowl with a small hole in its
bottom was filled to the rim, and when it was empty, a speaker in court had used up his time. The weakness of such a
clock was that the water ran faster when the bowl was full than when it was nearly empty, and that in winter it ran
slower than in summer. Builders answered with bowls whose walls leaned inward, with floats and wheels, and with a
second vessel that kept the first one full. The most famous of these machines moved figures, rang bells and dropped
metal balls into the mouths of dragons. They were admired for centuries, and yet none of them could tell the minute.
For that, something was needed that swings the same way in any weather: a weight at the end of a rod.""",
    """When the first telegraph line was opened between the two cities, the operators agreed on rules that nobody had
written down before. Each message was numbered, and the number was sent first. Whoever received it repeated the number
at the end, so that the sender knew that nothing was lost on the way. If no answer came within a minute, the sender
tried again, with the same number, and if the first message had arrived after all, the receiver threw the second one
away. A clerk who fell asleep was woken by a bell, and a clerk who fell ill was replaced by another, who looked into
the book to see which numbers had been taken already and went on from there. It was slow, and it was dull, and in
forty years not one message was delivered twice. Modern engineers have given these rules grander names, but they have
not found better ones.""",
    """The mountain hut stands at two thousand four hundred metres, an hour below the pass. In summer it has sixty beds,
in winter none, because the path is closed from November until the snow has gone from the gully. Everything that is
eaten there is carried up by a mule with a bad temper and a good memory, who knows the way so well that she goes alone.
The keeper rises at four, lights the stove and looks at the sky. When the wind comes from the south and the far ridge
seems close enough to touch, he tells the guests to stay, and most of them do. Those who go anyway come back by noon,
wet and silent, and he gives them soup without saying a word. At night, when the lamps are out, you can hear the
glacier: it groans like a ship, and now and then a stone falls somewhere and takes a long time to land.""",
    """A good map leaves out almost everything. It does not show the colour of the houses, the height of the grass or
the mood of the people, and for this reason it can show where the road goes. The first thing that a map maker decides
is what the map is for. A sailor needs the depth of the water and the shape of the coast, and cares little for what
grows behind the beach. A farmer needs the borders of the fields and the course of the ditches. A walker needs the
paths, the springs and the places where a bridge has been washed away. If you try to please all of them on one sheet,
you please nobody, because the eye finds nothing to rest on. So the best maps are those in which you can feel that
somebody had the courage to say no: no to the third kind of forest, no to the small print, no to the pretty frame.""",
    """In the repair shop at the end of the street, the radios stand on shelves up to the ceiling, each with a paper
label tied to its knob. The labels say who brought it, on which day, and what it does wrong. One hums. One falls silent
when a tram goes by. One plays only the station that its owner hates. The man who repairs them never begins with a
screwdriver. He switches the radio on, sits down, and listens for as long as it takes. Then he makes a guess, writes it
on the back of the label, and only after that does he open the case. When he was right, he draws a small circle next to
the guess, and when he was wrong, he writes what it really was. He has kept all the labels of thirty years in shoe
boxes. They are, he says, the only textbook that he ever needed, and the wrong guesses are the better half of it.""",
    """Bees find their way home by the sun, even when clouds hide it, because the light of the sky is ordered in a
pattern that their eyes can see and ours cannot. A bee that has found a meadow in bloom flies back to the hive and
dances on the comb in the dark. The angle between her path and the vertical is the angle between the meadow and the
sun, and the length of the dance tells the distance. The others follow her with their feelers, and then they fly to a
place where they have never been. The surprising part is that she corrects her dance while she is dancing: the sun
moves on, she cannot see it from inside, and yet the angle turns with it. She carries a clock, in other words, and a
table of the sky, in a head the size of a grain of sand.""",
    """The committee met on the first Monday of the month in the room above the bakery, where it was always warm. There
were seven members, and each of them had a chair that nobody else would have dared to take. The treasurer read the
accounts, which took four minutes, and the secretary read the letters, which took an hour, because she did all the
voices. Then they spoke about the bridge. The bridge had been on the list for nine years. Everybody agreed that it had
to be painted, and everybody agreed that it must not be green, and beyond that they had never been able to agree on
anything. In the tenth year somebody painted it at night, without asking, in a dark and friendly blue. The committee
met, expressed its deep regret, and put the question of the railing on the list.""",
]
